"""Fixtures of the tests of other projects."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.run import coverage
from tests.others.fetch import sources
from tests.others.vllm_sources import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def seeded_search() -> Iterator[None]:
    """Search with a fixed seed and a coverage of its own, and ignore warnings of imports."""
    saved_settings, saved_coverage = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=500, steps=20, seed=1))
    coverage.set_current(coverage.Coverage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    settings.set_current(saved_settings)
    coverage.set_current(saved_coverage)


@pytest.fixture
def project_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the project that the test's module names from its sources."""
    monkeypatch.syspath_prepend(sources(request.module.PROJECT))


@pytest.fixture
def vllm_sources(monkeypatch: pytest.MonkeyPatch, seeded_search: None) -> None:  # noqa: ARG001
    """Import vLLM from its sources, in a search with a fixed seed."""
    monkeypatch.syspath_prepend(SOURCES)
