"""Two decode steps compared, in processes that take turns, until it is clear which is slower.

What differs between two processes that run the same code is more than what differs between
two moments in one: where its memory happens to lie makes a step some percent faster or slower
for as long as it lives. So a comparison is made of many short *series*, each with two fresh
processes, and the series are what the interval is an interval of.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.time.interval import Verdict, median_interval, verdict_of
from pytest_roseinfer.gates.time.worker_process import CannotMeasure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.gates.time.interval import Interval
    from pytest_roseinfer.gates.time.worker_process import Ready, Worker


@dataclass(frozen=True, slots=True)
class Look:
    """After how many series the comparison may end, and the error it may make by that."""

    series: int
    error: float
    """The probability that the interval is wrong, on either side."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The effort of a comparison and its margin. Each number has its reason in docs/gates.md."""

    margin: float = 0.02
    """A token may take so much more time."""
    seconds: float = 300
    """The budget: a comparison that is unsure after so long stays unsure."""
    looks: tuple[Look, ...] = (
        Look(13, 0.0002),
        Look(20, 0.0006),
        Look(28, 0.0006),
        Look(40, 0.0008),
        Look(60, 0.0008),
    )
    """The errors add up to less than one in 200, whatever the look that a comparison ends at."""
    rounds: int = 8
    """A series has so many; each side runs twice in each."""
    turn_seconds: float = 0.003
    """A side runs so long, in whole steps, before it is the other's turn."""
    least_steps: int = 3
    """A turn has at least these: the first finds the other's data in the processor's caches."""
    series_per_process: int = 1

    def without_shortcuts(self) -> Plan:
        """The plan that goes to its end, however clear the ratio is before."""
        return replace(self, looks=self.looks[-1:])


@dataclass(slots=True)
class Timings:
    """The times of one side."""

    ready: Ready
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of each step."""
    series_tpot: list[float] = field(default_factory=list)
    """Each series' median step."""
    path_counts: dict[str, int] = field(default_factory=dict)

    def steps(self) -> list[float]:
        return [step for turn in self.turns for step in turn]


@dataclass(frozen=True, slots=True)
class Comparison:
    there: Timings
    here: Timings
    ratios: tuple[float, ...]
    """Time here over time there, of each series."""
    interval: Interval
    verdict: Verdict
    doubt: str
    """The reason to call the verdict UNSURE whatever the interval says; empty if there is none."""
    seconds: float

    @property
    def ratio(self) -> float:
        return median(self.ratios)


class Comparing:
    """``start(series)`` starts both sides' workers; ``doubt()`` says why not to trust clocks."""

    def __init__(
        self,
        plan: Plan,
        start: Callable[[int], tuple[Worker, Worker]],
        doubt: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._start = start
        self._doubt = doubt
        self._clock = clock
        self._sides: tuple[Timings, Timings] | None = None
        self._steps = 0
        self._ratios: list[float] = []

    def compare(self) -> Comparison:
        begin = self._clock()
        look = self._plan.looks[0]
        for look in self._plan.looks:
            enough = self._measure_up_to(look.series, begin)
            if not enough:
                break
            interval = median_interval(self._ratios, look.error)
            verdict = verdict_of(interval, self._plan.margin)
            if verdict is not Verdict.UNSURE:
                break
        doubt = self._doubt()
        assert self._sides
        return Comparison(
            *self._sides,
            ratios=tuple(self._ratios),
            interval=interval,
            verdict=Verdict.UNSURE if doubt else verdict,
            doubt=doubt,
            seconds=self._clock() - begin,
        )

    def _measure_up_to(self, series: int, begin: float) -> bool:
        """Return False if the budget ran out before so many; the first look is always afforded."""
        first = self._plan.looks[0].series
        while len(self._ratios) < series:
            if len(self._ratios) >= first and self._clock() - begin > self._plan.seconds:
                return False
            self._run_processes(len(self._ratios))
        return True

    def _run_processes(self, series: int) -> None:
        workers = self._start(series)
        try:
            there, here = (Timings(worker.ready) for worker in workers)
            self._sides = self._sides or comparable(there, here)
            # The same for both, and for all series.
            self._steps = self._steps or steps_of_a_turn(self._plan, workers)
            for worker in workers:
                worker.seconds(2 * self._steps)
            for _ in range(self._plan.series_per_process):
                self._ratios.append(self._series(workers))
        finally:
            for worker in workers:
                worker.stop()

    def _series(self, workers: tuple[Worker, Worker]) -> float:
        assert self._sides
        turns = measure_turns(self._plan, self._steps, [*zip(workers, self._sides, strict=True)])
        return paired_ratio(*turns)


def comparable(there: Timings, here: Timings) -> tuple[Timings, Timings]:
    """Return both if they do the same work, and raise otherwise."""
    if there.ready.tokens != here.ready.tokens:
        raise CannotMeasure(
            f"a step brings {here.ready.tokens} tokens here and {there.ready.tokens} there: their "
            "times say nothing about each other"
        )
    return there, here


def steps_of_a_turn(plan: Plan, workers: Sequence[Worker]) -> int:
    """Find how many steps fill a turn of the fastest worker."""
    for worker in workers:
        worker.seconds(plan.least_steps)  # compiles, allocates
    step = min(median(worker.seconds(plan.least_steps)) for worker in workers)
    return max(plan.least_steps, math.ceil(plan.turn_seconds / step))


def measure_turns(
    plan: Plan, steps: int, sides: Sequence[tuple[Worker, Timings]]
) -> list[list[list[float]]]:
    """A series: the turns of each side, which are added to its timings.

    In every round each comes first as often as second, so a drift favours neither.
    """
    turns: list[list[list[float]]] = [[] for _ in sides]
    for _ in range(plan.rounds):
        for order in (range(len(sides)), reversed(range(len(sides)))):
            for side in order:
                turns[side].append(sides[side][0].seconds(steps))
    for (worker, timings), own in zip(sides, turns, strict=True):
        timings.turns += own
        timings.series_tpot.append(median(step for turn in own for step in turn))
        timings.path_counts = worker.path_counts()
    return turns


def paired_ratio(there: list[list[float]], here: list[list[float]]) -> float:
    """The median over rounds of two turns each, so that what both sides met at once cancels."""
    logs = [
        math.log(median(mine) / median(theirs)) for theirs, mine in zip(there, here, strict=True)
    ]
    rounds = [(first + second) / 2 for first, second in zip(logs[::2], logs[1::2], strict=True)]
    return math.exp(median(rounds))
