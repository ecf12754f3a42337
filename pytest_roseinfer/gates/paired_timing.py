"""Paired timing of a step on two sides: series, intervals and verdicts; and absolute baselines."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare, read_steps, write_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pytest_roseinfer.gates.worker_process import Ready, Worker

    Turns = list[list[float]]
    """The seconds of each step, in each turn of one side."""

# Confidence intervals of a median ratio, and verdicts.


_RESAMPLES = 20_000
"""Number of bootstrap resamples; enough for dozens in the narrowest tail in use."""
_SEED = 20_011
"""Fixed seed: the same values always give the same interval, so verdicts are reproducible."""


class Verdict(StrEnum):
    """The verdict on one side, compared with the other."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of the ratio of time here to time there."""

    low: float
    high: float

    def __str__(self) -> str:
        return "none" if self == UNBOUNDED else f"{self.low:.3f} to {self.high:.3f}"


UNBOUNDED = Interval(0.0, math.inf)
"""Interval of too few values."""


def verdict_of(interval: Interval, margin: float) -> Verdict:
    """Return the verdict on the whole interval; a margin of 0.02 tolerates 2% more time."""
    if interval.low > 1 + margin:
        return Verdict.SLOWER
    if interval.high < 1 / (1 + margin):
        return Verdict.FASTER
    if interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin:
        return Verdict.SAME
    return Verdict.UNDECIDED


def median_interval(values: Sequence[float], error: float) -> Interval:
    """Bound the median; each bound is wrong with a probability of at most ``error``.

    The bounds are those of the percentile bootstrap, widened where needed to the interval of
    order statistics, which holds for any distribution: with few values, bootstrap intervals are
    too narrow.
    """
    if not (rank := _outermost(len(values), error)):
        return UNBOUNDED
    import numpy as np

    random = np.random.default_rng(_SEED)
    chosen = random.integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[chosen], axis=1)
    low, high = np.quantile(medians, [error, 1 - error])
    ordered = sorted(values)
    return Interval(min(float(low), ordered[rank - 1]), max(float(high), ordered[-rank]))


def _outermost(count: int, error: float) -> int:
    """Return the largest rank whose value exceeds the true median with probability <= error."""
    rank, tail = 0, 1 / 2**count
    while tail <= error:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    return rank


# Progress of long measurements, in lines that also work in a pipe.


_FIRST = 2.0
"""Seconds before the first line of progress."""
_EVERY = 5.0
"""Minimum seconds between two lines."""


class Progress:
    """Rate-limited lines of progress, printed with ``print_status``."""

    def __init__(
        self, print_status: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = print_status
        self._clock = clock
        self._begin = clock()
        self._next_note = self._begin + _FIRST

    def announce(self, words: str) -> None:
        """Print a line at once, if there is one."""
        if words:
            self._say(words)

    def note(self, words: Callable[[], str]) -> None:
        """Print ``words()`` and the elapsed time, if a line is due."""
        now = self._clock()
        if now >= self._next_note:
            self._say(f"{words()} ({now - self._begin:.0f} s)")
            self._next_note = now + _EVERY


@dataclass(frozen=True, slots=True)
class InterimAnalysis:
    """Point where a comparison may end."""

    series: int
    """Number of series before it."""
    error: float
    """Probability, per side, that the interval is wrong."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Effort and margin of a comparison; docs/how-to/gates.md explains each number."""

    margin: float = 0.02
    """Share of additional time that a step may take."""
    seconds: float = 300
    """Time limit in seconds of an undecided comparison, which has at least one interim analysis."""
    hard_end: bool = False
    """True to end a comparison by then in any case, after its first series at the earliest."""
    interim_analyses: tuple[InterimAnalysis, ...] = (
        InterimAnalysis(13, 0.0002),
        InterimAnalysis(20, 0.0006),
        InterimAnalysis(28, 0.0006),
        InterimAnalysis(40, 0.0008),
        InterimAnalysis(60, 0.0008),
    )
    """Interim analyses; their errors add up to less than one in 200."""
    rounds: int = 8
    """Rounds of a series; each side runs twice in each."""
    turn_seconds: float = 0.003
    """Minimum seconds that a side runs, in whole steps, before the other's turn."""
    least_steps: int = 3
    """Minimum steps of a turn: the first one runs with the other side's data in the caches."""
    series_per_process: int = 1


@dataclass(slots=True)
class Timings:
    """Times of one side."""

    ready: Ready
    turns: Turns = field(default_factory=list)
    series_tpot: list[float] = field(default_factory=list)
    """Median seconds per step of each series."""
    path_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of timing both sides."""

    there: Timings
    here: Timings
    ratios: tuple[float, ...]
    """Ratio of time here to time there, of each series."""
    interval: Interval
    verdict: Verdict
    doubt: str
    """Why the times cannot be trusted and the verdict is UNDECIDED; empty if they can."""
    seconds: float
    missed_analysis: int = 0
    """Series of the next interim analysis, which the time did not suffice for; 0 if it did."""

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def paired_tpot(self) -> tuple[list[float], list[float]]:
        """The step's times there and here in each series, normalised to one machine speed.

        Slowdowns that both sides of a series share are removed, so that the ratio of the medians
        is ``ratio``; the ratio of the raw medians can differ.
        """
        times = zip(self.there.series_tpot, self.here.series_tpot, strict=True)
        typical = median(math.sqrt(there * here) for there, here in times)
        factors = [math.sqrt(ratio) for ratio in self.ratios]
        return [typical / each for each in factors], [typical * each for each in factors]


@dataclass(slots=True)
class Measuring:
    """Measurement of series, of one side alone or of two in turns."""

    plan: Plan
    sides: list[Timings] = field(default_factory=list)
    _steps: int = 0
    """Steps of a turn, the same for all sides and series."""

    def run(self, workers: Sequence[Worker]) -> list[list[Turns]]:
        """Run the series of these workers, stop them, and return the turns of each series."""
        with ExitStack() as stopping:
            for worker in workers:
                stopping.callback(worker.stop)
            ready = [worker.ready for worker in workers]
            if ready[0].tokens != ready[-1].tokens:
                raise CannotCompare(
                    f"a step generates {ready[-1].tokens} tokens here and {ready[0].tokens} there: "
                    "their times cannot be compared"
                )
            self.sides = self.sides or [Timings(each) for each in ready]
            self._steps = self._steps or self._steps_of_a_turn(workers)
            for worker in workers:
                worker.seconds(2 * self._steps)
            return [self._series(workers) for _ in range(self.plan.series_per_process)]

    def _steps_of_a_turn(self, workers: Sequence[Worker]) -> int:
        """Return the number of steps that fill a turn of the fastest worker."""
        least = self.plan.least_steps
        for worker in workers:
            worker.seconds(least)  # compiles, allocates
        step = min(median(worker.seconds(least)) for worker in workers)
        return max(least, math.ceil(self.plan.turn_seconds / step))

    def _series(self, workers: Sequence[Worker]) -> list[Turns]:
        """Run a series; each side runs first as often as second, so a drift favours neither."""
        turns: list[Turns] = [[] for _ in workers]
        sides = range(len(workers))
        for _ in range(self.plan.rounds):
            for side in (*sides, *reversed(sides)):
                turns[side].append(workers[side].seconds(self._steps))
        for worker, timings, side_turns in zip(workers, self.sides, turns, strict=True):
            timings.turns += side_turns
            timings.series_tpot.append(median(step for turn in side_turns for step in turn))
            timings.path_counts = worker.path_counts()
        return turns


@dataclass(slots=True)
class _Budget:
    """Time budget of a comparison."""

    plan: Plan
    clock: Callable[[], float]
    begin: float = field(init=False)
    _longest: float = 0.0

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self.begin

    def allows(self, series: int) -> bool:
        """Return True if there is time for another series after ``series`` of them."""
        if self.plan.hard_end:
            return series == 0 or self.spent + self._longest <= self.plan.seconds
        return series < self.plan.interim_analyses[0].series or self.spent <= self.plan.seconds

    @contextmanager
    def timed_series(self) -> Iterator[None]:
        """Record the duration of the series that run inside the context."""
        begin = self.clock()
        yield
        self._longest = max(self._longest, self.clock() - begin)


def compare(
    plan: Plan,
    start: Callable[[int], tuple[Worker, Worker]],
    doubt: Callable[[], str] = str,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two sides by a plan.

    ``start`` gets the number of pairs started before and starts the workers of both sides, there
    and here. ``doubt`` returns why times cannot be trusted, or "". ``progress`` prints the state
    of the comparison.
    """
    budget = _Budget(plan, clock)
    measuring = Measuring(plan)
    ratios: list[float] = []
    interval, verdict, missed = UNBOUNDED, Verdict.UNDECIDED, 0
    for analysis in plan.interim_analyses:
        while len(ratios) < analysis.series and budget.allows(len(ratios)):
            with budget.timed_series():
                series = measuring.run(start(len(ratios) // plan.series_per_process))
            if progress and not ratios:
                progress.announce(describe_duration(plan, budget.spent / len(series)))
            ratios += [paired_ratio(there, here) for there, here in series]
            if progress:
                progress.note(partial(describe_progress, ratios, analysis))
        if len(ratios) < analysis.series:
            missed = analysis.series
            break
        interval = median_interval(ratios, analysis.error)
        verdict = verdict_of(interval, plan.margin)
        if verdict is not Verdict.UNDECIDED:
            break
    if reason := doubt():
        verdict = Verdict.UNDECIDED
    there, here = measuring.sides
    seconds = budget.spent
    return Comparison(there, here, tuple(ratios), interval, verdict, reason, seconds, missed)


_SOON = 10.0
"""Seconds of a comparison whose end is not announced."""


def describe_duration(plan: Plan, series_seconds: float) -> str:
    """Describe when a comparison will end whose series take this long; "" if that is soon."""
    first, last = (plan.interim_analyses[at].series * series_seconds for at in (0, -1))
    if last < _SOON:
        return ""
    latest = min(last, plan.seconds) if plan.hard_end else max(first, min(last, plan.seconds))
    times = f"{first:.0f} to {latest:.0f} s" if first < latest else f"{latest:.0f} s"
    ends = f"a verdict comes after {times}"
    if first > latest:
        ends = f"no verdict comes within {latest:.0f} s, since the first needs {first:.0f} s"
    return f"a series takes {series_seconds:.1f} s: {ends}"


def describe_progress(ratios: Sequence[float], analysis: InterimAnalysis) -> str:
    """Describe the interim result of a comparison, and when the next analysis is."""
    interval = median_interval(ratios, analysis.error)
    within = "" if interval == UNBOUNDED else f", in {interval}"
    count = f"{len(ratios)} series, next analysis after {analysis.series}"
    return f"{count}: here / there {median(ratios):.3f}{within}"


def paired_ratio(there: Turns, here: Turns) -> float:
    """Return the median ratio over rounds, where slowdowns of both sides cancel."""
    logs = [
        math.log(median(mine) / median(theirs)) for theirs, mine in zip(there, here, strict=True)
    ]
    rounds = [(first + second) / 2 for first, second in zip(logs[::2], logs[1::2], strict=True)]
    return math.exp(median(rounds))


# Absolute baselines: the time of a step on a GPU of this name.
#
# Times cannot be compared between machines, and only roughly on a shared one. This check catches a
# step that became much slower without a paired comparison.
# The file: ``{"format": 1, "steps": {test: {GPU: {"tpot_us": 682.0}}}}``.


OPTION = "--roseinfer-tpot"
UPDATE = "--roseinfer-update-tpot"
TOLERATED = 0.10
"""Share of additional time that is tolerated: GPUs of one name differ by some percent."""
_PROCESSES = 3


def measure_alone(
    plan: Plan, start: Callable[[int], Worker], progress: Progress | None = None
) -> Timings:
    """Time the step of one side, in a few processes one after the other."""
    measuring = Measuring(replace(plan, series_per_process=1))
    for series in range(_PROCESSES):
        measuring.run([start(series)])
        if progress:
            progress.note(partial("{} of {} processes timed".format, series + 1, _PROCESSES))
    return measuring.sides[0]


def describe_excess(timings: Timings, file: Path, test: str) -> str:
    """Describe by how much the step exceeds its baseline; return "" if it does not."""
    device = timings.ready.device
    if not file.exists():
        raise CannotCompare(f"{OPTION}: {file} does not exist; {UPDATE} writes it")
    baselines = read_steps(file).get(test, {})
    if device not in baselines:
        raise CannotCompare(
            f"{file}: no time of this step on {device}, only on "
            f"{', '.join(baselines) or 'no GPU'}, "
            f"which cannot be compared; {UPDATE} records one"
        )
    was, now = float(baselines[device]["tpot_us"]), _microseconds(timings)
    if now <= (1 + TOLERATED) * was:
        return ""
    return (
        f"a step on {device}: {now:.1f} us, baseline {was:.1f} us in {file}, which is "
        f"{now / was - 1:.0%} more; {TOLERATED:.0%} are tolerated; if that is intended, {UPDATE} "
        "writes the new baseline"
    )


def update(file: Path, test: str, timings: Timings) -> None:
    """Write one time, and keep those of other tests and GPUs."""
    steps = read_steps(file)
    entry = {"tpot_us": round(_microseconds(timings), 1)}
    steps.setdefault(test, {})[timings.ready.device] = entry
    write_steps(file, steps)


def _microseconds(timings: Timings) -> float:
    return 1e6 * median(timings.series_tpot)
