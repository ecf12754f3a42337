"""The markers, what they may be given, and what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.settings import Settings

_GPU = "roseinfer_gpu"
_BUDGET = "roseinfer"
_BUDGET_ARGUMENTS = ("examples", "steps")
LINES = (
    f"{_GPU}: needs a GPU; runs with --roseinfer-gpu",
    f"{_BUDGET}(examples=N, steps=N): how hard to look here, unless the command line says",
)


def check(items: Iterable[pytest.Item]) -> None:
    """Refuse arguments that a marker does not have."""
    for item in items:
        for marker in item.iter_markers(_GPU):
            if marker.args or marker.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: the marker {_GPU} takes no arguments")
        for marker in item.iter_markers(_BUDGET):
            _check_budget(item, marker)


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a GPU: run with --roseinfer-gpu")
    for item in items:
        if item.get_closest_marker(_GPU):
            item.add_marker(skip)


def budget(item: pytest.Item, asked: Settings) -> Settings:
    """The settings for one test: what its marker says and the command line leaves open."""
    numbers = {"examples": asked.examples, "steps": asked.steps}
    for marker in reversed([*item.iter_markers(_BUDGET)]):  # the closest says last
        numbers |= {
            name: number
            for name, number in marker.kwargs.items()
            if item.config.getoption(f"--roseinfer-{name}") is None
        }
    return replace(asked, examples=numbers["examples"], steps=numbers["steps"])


def _check_budget(item: pytest.Item, marker: pytest.Mark) -> None:
    unknown = [repr(argument) for argument in marker.args]
    unknown += [name for name in marker.kwargs if name not in _BUDGET_ARGUMENTS]
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker {_BUDGET} does not take {', '.join(unknown)}, only "
            f"{' and '.join(f'{name}=N' for name in _BUDGET_ARGUMENTS)}"
        )
    for name, number in marker.kwargs.items():
        if not isinstance(number, int) or number < 1:
            raise pytest.UsageError(
                f"{item.nodeid}: the marker {_BUDGET} has {name}={number!r}: expected a whole "
                "number from 1"
            )
