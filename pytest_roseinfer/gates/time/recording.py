"""Each side's turns as a run of pytest-benchmark's, so that what it saves and compares is them.

Two sides take turns, and its fixture runs one function until it is done with it. So what it
is given to run is a side's turns once more, on a clock that goes on by what each took.
"""

from __future__ import annotations

import copy
from itertools import cycle
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_roseinfer.gates.time.paired import Timings


class Recording:
    """Records one test, which must not use the fixture ``benchmark`` for anything else."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._now = 0.0
        said = request.node.get_closest_marker("benchmark")
        options = {"group": request.node.nodeid, **(said.kwargs if said else {})}
        marker = pytest.mark.benchmark(**options | {"timer": self._clock})
        request.node.add_marker(marker, append=False)
        self._fixture: Any = request.getfixturevalue("benchmark")

    def _clock(self) -> float:
        return self._now

    def add(self, timings: Timings, extra_info: dict[str, Any], name: str = "") -> None:
        """A run for a side; the one with no name goes by that of the test."""
        fixture = self._fixture
        if name:
            fixture = copy.copy(fixture)
            fixture.name += f" ({name})"
            fixture.fullname += f" ({name})"
        fixture.extra_info = extra_info
        turns = cycle(mean(turn) for turn in timings.turns)  # profiling takes some again
        fixture.pedantic(lambda: self._pass(next(turns)), rounds=len(timings.turns))

    def _pass(self, seconds: float) -> None:
        self._now += seconds
