"""Recorded runs as ``--roseinfer-timings`` writes them, one day apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.history import RunFigures
from pytest_roseinfer.gates.timing_report import TimedComparison, entry_of
from tests.gates.simulated import compare, quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

TEST = "test_speed.py::test_decode"


def run(day: int, *, slower: float = 1.0, calls: int = 40, torch: str = "2.13.0") -> RunFigures:
    """Return a run in which a step takes ``slower`` times the reference's 1000 us."""
    times = entry_of(TimedComparison(TEST, "v1", compare(quiet(), slower), 0.02))
    work = {
        "test": TEST,
        "step": "steady",
        "device": "cpu",
        "tokens": 4,
        "counts": {"python_calls": calls, "graph_replays": 0},
        "more": [f"Python calls: {calls} a step, baseline 40"] if calls > 40 else [],
        "less": [],
    }
    return RunFigures(
        timestamp=f"2026-11-{day:02}T10:00:00+00:00",
        commit=f"{day:02}".ljust(40, "0"),
        dirty=False,
        environment={"python": "3.11.7", "torch": torch},
        times=[times],
        work=[work],
    )


def without_times(runs: Sequence[RunFigures]) -> list[RunFigures]:
    return [replace(each, times=[]) for each in runs]
