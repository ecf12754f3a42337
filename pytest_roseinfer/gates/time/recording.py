"""The turns of both sides as runs of pytest-benchmark, which can save and compare them.

The fixture of pytest-benchmark runs one function until it is done with it, and our two sides
take turns. So it is given each side's turns once more, on a clock that moves on by what they
took.
"""

from __future__ import annotations

import copy
from itertools import cycle
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.gates.time.paired import Timings


def record(
    request: pytest.FixtureRequest, runs: Mapping[str, tuple[Timings, dict[str, Any]]]
) -> None:
    """Record a test's sides by name, each with its ``extra_info``; "" goes by the test's name.

    The test must not use the fixture ``benchmark`` for anything else.
    """
    now = 0.0

    def pass_turn() -> None:
        nonlocal now
        now += next(turns)

    said = request.node.get_closest_marker("benchmark")
    options = {"group": request.node.nodeid, **(said.kwargs if said else {})}
    marker = pytest.mark.benchmark(**options | {"timer": lambda: now})
    request.node.add_marker(marker, append=False)
    benchmark: Any = request.getfixturevalue("benchmark")
    for name, (timings, extra_info) in runs.items():
        fixture = copy.copy(benchmark) if name else benchmark
        if name:
            fixture.name += f" ({name})"
            fixture.fullname += f" ({name})"
        fixture.extra_info = extra_info
        turns = cycle(mean(turn) for turn in timings.turns)  # profiling takes some again
        fixture.pedantic(pass_turn, rounds=len(timings.turns))
