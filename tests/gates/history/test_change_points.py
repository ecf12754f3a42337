"""Change points of figures, with their commit and the differences of the environment."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.history import RATIO, TIME, Point, Trend, change_points, trends_of
from tests.gates.history.runs import TEST, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def trend(values: Sequence[float], *, exact: bool = False) -> Trend:
    """Return the trend of a step whose figure has these values."""
    return Trend("step", TIME, exact, [Point(run(1), value) for value in values])


def noisy(levels: Sequence[float], seed: int) -> Trend:
    """Return a trend of times with 2% noise, one in ten of them from a busy day and far longer."""
    draw = random.Random(seed)
    busy = [1 + 0.5 * (draw.random() < 0.1) for _ in levels]
    return trend(
        [each * draw.gauss(1, 0.02) * factor for each, factor in zip(levels, busy, strict=True)]
    )


def test_trends_exist_for_figures_and_not_for_zero_counts() -> None:
    trends = trends_of([run(1), run(2, slower=1.1)])
    step = f"{TEST}, steady on cpu"
    assert [(each.step, each.figure, each.exact) for each in trends] == [
        (f"{TEST} on cpu", TIME, False),
        (f"{TEST} against v1", RATIO, False),
        (step, "python_calls", True),
    ]
    assert [point.value for point in trends[1].points] == pytest.approx([1, 1.1])


needs_ruptures = pytest.mark.skipif(
    find_spec("ruptures") is None, reason="finds changes of times: pip install '.[test]'"
)


@pytest.mark.slow
@needs_ruptures
def test_change_of_times_is_located() -> None:
    changes_of_seeds = [
        list(change_points(noisy([100] * 12 + [115] * 8, seed))) for seed in range(10)
    ]
    right = [
        changes
        for changes in changes_of_seeds
        if [abs(each.at - 12) <= 1 for each in changes] == [True]
    ]
    assert len(right) >= 8
    assert all(each.before < 104 < 110 < each.after for changes in right for each in changes)


@pytest.mark.slow
@needs_ruptures
def test_noisy_times_have_no_change_point() -> None:
    changes_of_seeds = [list(change_points(noisy([100] * 20, seed))) for seed in range(20)]
    assert sum(map(bool, changes_of_seeds)) <= 1


def test_too_few_times_have_no_change_point() -> None:
    assert list(change_points(trend([100, 100, 300, 300, 300]))) == []


def test_every_change_of_a_count_is_a_change_point() -> None:
    changes = list(change_points(trend([40, 40, 41, 41, 39], exact=True)))
    assert [(each.at, each.before, each.after) for each in changes] == [(2, 40, 41), (4, 41, 39)]


def test_change_point_names_commit_and_environment() -> None:
    runs = [run(1), run(2), run(3, calls=44, torch="2.14.0"), run(4, calls=41, torch="2.14.0")]
    first, second = change_points(trends_of(runs)[2])
    assert str(first) == (
        f"{TEST}, steady on cpu, python_calls: 40 -> 44 (+10.0%) at 030000000 "
        "(2026-11-03T10:00:00+00:00), the run before was 020000000\n  torch: 2.13.0 -> 2.14.0"
    )
    assert str(second).endswith("\n  the environment is the same")
