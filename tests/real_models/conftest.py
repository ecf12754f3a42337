"""Real models, loaded once in each process, and the figures that their tests measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.real_models.real_model import RealModel, gemma_file, smollm2_file

if TYPE_CHECKING:
    from collections.abc import Callable

_FIGURE = "figure"


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    return RealModel.load(smollm2_file())


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    return RealModel.load(gemma_file(tmp_path_factory.mktemp("gemma")))


@pytest.fixture(
    params=[
        pytest.param(each, marks=pytest.mark.xdist_group(each)) for each in ("smollm2", "gemma")
    ]
)
def real_model(request: pytest.FixtureRequest) -> RealModel:
    model: RealModel = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a line to the figures at the end of the run."""
    return lambda line: record_property(_FIGURE, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == _FIGURE
    ]
    if lines:
        terminalreporter.section("figures of real models")
        terminalreporter.write("\n".join(lines) + "\n")
