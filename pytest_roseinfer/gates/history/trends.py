"""A trend is one figure of a step, run after run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.gates.history.kept_runs import KeptRun

TIME = "time of a step (us)"
RATIO = "here / there"


@dataclass(frozen=True, slots=True)
class Point:
    run: KeptRun
    value: float


@dataclass(slots=True)
class Trend:
    step: str
    """The test, and where it runs or what it is compared with."""
    figure: str
    exact: bool
    """Counts are the same every time, and times are not."""
    points: list[Point] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.step}, {self.figure}"


def trends_of(runs: Sequence[KeptRun]) -> list[Trend]:
    """Put together what runs say about the same figure; counts that stay 0 are left out."""
    found: dict[tuple[str, str], Trend] = {}
    for run in runs:
        for step, figure, exact, value in _figures(run):
            trend = found.setdefault((step, figure), Trend(step, figure, exact))
            trend.points.append(Point(run, value))
    return [trend for trend in found.values() if any(point.value for point in trend.points)]


def _figures(run: KeptRun) -> Iterator[tuple[str, str, bool, float]]:
    for timed in run.times:
        here = timed["here"]
        yield f"{timed['test']} on {here['device']}", TIME, False, here["paired_tpot_us"]
        yield f"{timed['test']} against {timed['against']}", RATIO, False, timed["ratio"]
    for work in run.work:
        step = f"{work['test']}, {work['step']} on {work['device']}"
        for group, count in work["counts"].items():
            yield step, group, True, count
