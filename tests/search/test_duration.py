"""The line that tells how long a search will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.run.coverage import SearchDuration

if TYPE_CHECKING:
    from tests.project import Project

LINE = (
    "roseinfer: Slow: {} of 160 mixes took {} s, so all take about {} min; "
    "--roseinfer-examples N tries fewer, and --roseinfer-search-seconds S sets a limit"
)


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [(2.0, [LINE.format(32, 16, 1)]), (10.0, [LINE.format(8, 20, 7)]), (1.0, [])],
)
def test_long_search_says_once_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lines: list[str]
) -> None:
    now, printed = [0.0], list[str]()
    monkeypatch.setattr(settings, "_current", settings.Settings(announce=printed.append))
    duration = SearchDuration("Slow", 160, "mixes", lambda: now[0])
    for _ in range(40):
        now[0] += seconds
        duration.note(4)
    assert printed == lines


@pytest.mark.slow
def test_line_reaches_the_terminal_past_the_capture(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it="""
            from caches.list_cache import ListCache
            from pytest_roseinfer import conformance
            from pytest_roseinfer.run import coverage

            coverage._LONG = coverage._TRIED_SECONDS = 0.0
            TestIt = conformance(ListCache)
        """
    )
    result = project.pytest("-k", "histories", "--roseinfer-examples=30", "-q")
    result.stdout.fnmatch_lines(
        ["roseinfer: ListCache: * of 30 histories took * s, so all take about 0 min; *"]
    )
