"""Paired measurements of a step on two sides: series, intervals, verdicts, and the tripwire."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.gate import CannotCompare, read_steps, write_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import pytest

    from pytest_roseinfer.gates.worker_process import Ready, Worker

    Turns = list[list[float]]
    """The seconds of each step, in each turn of one side."""

# How far a median can be trusted, and what that says about the ratio of two times.


_RESAMPLES = 20_000
"""Enough for dozens to lie in the narrowest tail that is asked about."""
_SEED = 20_011
"""The same values always give the same interval, so a verdict can be computed again."""


class Verdict(StrEnum):
    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Interval:
    """The bounds of the ratio: time here over time there."""

    low: float
    high: float

    def __str__(self) -> str:
        return "none" if self == UNBOUNDED else f"{self.low:.3f} to {self.high:.3f}"


UNBOUNDED = Interval(0.0, math.inf)
"""What too few values say."""


def verdict_of(interval: Interval, margin: float) -> Verdict:
    """Return what holds for the whole interval; a margin of 0.02 tolerates 2% more time."""
    if interval.low > 1 + margin:
        return Verdict.SLOWER
    if interval.high < 1 / (1 + margin):
        return Verdict.FASTER
    if interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin:
        return Verdict.SAME
    return Verdict.UNDECIDED


def median_interval(values: Sequence[float], error: float) -> Interval:
    """Bound the median; on either side that is wrong with a probability of at most ``error``.

    The bounds are those of the percentile bootstrap, widened where needed to the interval
    between two sorted values that holds for noise of any shape: with few values the bootstrap
    alone promises too much.
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
    """Return the largest rank whose value exceeds the true median with at most this error."""
    rank, tail = 0, 1 / 2**count
    while tail <= error:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    return rank


# A measurement that takes long says how far it is, in lines that reach a pipe as well.


_FIRST = 2.0
"""What takes no longer than so many seconds says nothing."""
_EVERY = 5.0
"""Seconds between two lines, at least."""


class Progress:
    """Hands lines to ``say``, and leaves out those that come too early."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._begin = clock()
        self._due = self._begin + _FIRST

    def note(self, words: Callable[[], str]) -> None:
        """Say ``words()`` and the time that has passed, if a line is due."""
        now = self._clock()
        if now >= self._due:
            self._say(f"{words()} ({now - self._begin:.0f} s)")
            self._due = now + _EVERY


def terminal_of(config: pytest.Config) -> Callable[[str], None]:
    """Return what writes a line of a running test to pytest's output at once, past its capture."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write_line(line)
            reporter.flush()

    return say


@dataclass(frozen=True, slots=True)
class Look:
    """A comparison may end after so many series."""

    series: int
    error: float
    """The probability that the interval is then wrong, on either side."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How hard to compare, and with which margin. docs/gates.md has the reason of each number."""

    margin: float = 0.02
    """A step may take so much more time."""
    seconds: float = 300
    """A comparison that is undecided after so long stays so; the first look is always afforded."""
    hard_end: bool = False
    """It ends by then in any case, or after its first series."""
    looks: tuple[Look, ...] = (
        Look(13, 0.0002),
        Look(20, 0.0006),
        Look(28, 0.0006),
        Look(40, 0.0008),
        Look(60, 0.0008),
    )
    """The errors add up to less than one in 200."""
    rounds: int = 8
    """The rounds of a series; each side runs twice in each."""
    turn_seconds: float = 0.003
    """A side runs so long, in whole steps, before it is the other's turn."""
    least_steps: int = 3
    """The fewest steps of a turn: the first finds the other's data in the processor's caches."""
    series_per_process: int = 1


@dataclass(slots=True)
class Timings:
    """The times of one side."""

    ready: Ready
    turns: Turns = field(default_factory=list)
    series_tpot: list[float] = field(default_factory=list)
    """The median step of each series."""
    path_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    there: Timings
    here: Timings
    ratios: tuple[float, ...]
    """Time here over time there, of each series."""
    interval: Interval
    verdict: Verdict
    doubt: str
    """Why the verdict is UNDECIDED whatever the interval says; empty if there is no reason."""
    seconds: float
    missed_look: int = 0
    """The series after which the next look would have been, had there been time; else 0."""

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def paired_tpot(self) -> tuple[list[float], list[float]]:
        """The step's time there and here in each series, at one speed of the machine.

        What slowed both sides of a series alike is left out, so that one median over the other
        is the ratio; medians of the times as they were taken can say something else.
        """
        taken = zip(self.there.series_tpot, self.here.series_tpot, strict=True)
        usual = median(math.sqrt(there * here) for there, here in taken)
        apart = [math.sqrt(ratio) for ratio in self.ratios]
        return [usual / each for each in apart], [usual * each for each in apart]


@dataclass(slots=True)
class Measuring:
    """Measures series of one side alone or of two in turns."""

    plan: Plan
    sides: list[Timings] = field(default_factory=list)
    _steps: int = 0
    """The steps of a turn, the same for all sides and series."""

    def run(self, workers: Sequence[Worker]) -> list[list[Turns]]:
        """Run as many series as these workers are good for, stop them, and return the turns."""
        with ExitStack() as stopping:
            for worker in workers:
                stopping.callback(worker.stop)
            ready = [worker.ready for worker in workers]
            if ready[0].tokens != ready[-1].tokens:
                raise CannotCompare(
                    f"a step brings {ready[-1].tokens} tokens here and {ready[0].tokens} there: "
                    "their times say nothing about each other"
                )
            self.sides = self.sides or [Timings(each) for each in ready]
            self._steps = self._steps or self._steps_of_a_turn(workers)
            for worker in workers:
                worker.seconds(2 * self._steps)
            return [self._series(workers) for _ in range(self.plan.series_per_process)]

    def _steps_of_a_turn(self, workers: Sequence[Worker]) -> int:
        """Find how many steps fill a turn of the fastest worker."""
        least = self.plan.least_steps
        for worker in workers:
            worker.seconds(least)  # compiles, allocates
        step = min(median(worker.seconds(least)) for worker in workers)
        return max(least, math.ceil(self.plan.turn_seconds / step))

    def _series(self, workers: Sequence[Worker]) -> list[Turns]:
        """Each side comes first as often as second in a round, so a drift favours neither."""
        turns: list[Turns] = [[] for _ in workers]
        sides = range(len(workers))
        for _ in range(self.plan.rounds):
            for side in (*sides, *reversed(sides)):
                turns[side].append(workers[side].seconds(self._steps))
        for worker, timings, own in zip(workers, self.sides, turns, strict=True):
            timings.turns += own
            timings.series_tpot.append(median(step for turn in own for step in turn))
            timings.path_counts = worker.path_counts()
        return turns


@dataclass(slots=True)
class _Budget:
    """The time that a comparison may take."""

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
        """Return True if there is time for more than so many series."""
        if self.plan.hard_end:
            return series == 0 or self.spent + self._longest <= self.plan.seconds
        return series < self.plan.looks[0].series or self.spent <= self.plan.seconds

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Note how long the series take that are measured within."""
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
    """Compare two sides as ``plan`` says.

    ``start`` starts the workers of both sides, there and here, and is told how many pairs it
    started before; ``doubt`` returns why times cannot be trusted, or ""; ``progress`` is told how
    far the comparison is.
    """
    budget = _Budget(plan, clock)
    measuring = Measuring(plan)
    ratios: list[float] = []
    interval, verdict, missed = UNBOUNDED, Verdict.UNDECIDED, 0
    for look in plan.looks:
        while len(ratios) < look.series and budget.allows(len(ratios)):
            with budget.taking():
                series = measuring.run(start(len(ratios) // plan.series_per_process))
            ratios += [paired_ratio(there, here) for there, here in series]
            if progress:
                progress.note(partial(so_far, ratios, look))
        if len(ratios) < look.series:
            missed = look.series
            break
        interval = median_interval(ratios, look.error)
        verdict = verdict_of(interval, plan.margin)
        if verdict is not Verdict.UNDECIDED:
            break
    if reason := doubt():
        verdict = Verdict.UNDECIDED
    there, here = measuring.sides
    seconds = budget.spent
    return Comparison(there, here, tuple(ratios), interval, verdict, reason, seconds, missed)


def so_far(ratios: Sequence[float], look: Look) -> str:
    """Say what the series of a comparison come to, and which look is next."""
    interval = median_interval(ratios, look.error)
    within = "" if interval == UNBOUNDED else f", in {interval}"
    count = f"{len(ratios)} series, a look after {look.series}"
    return f"{count}: here / there {median(ratios):.3f}{within}"


def paired_ratio(there: Turns, here: Turns) -> float:
    """Return the median over rounds of two turns each, so that what slowed both sides cancels."""
    logs = [
        math.log(median(mine) / median(theirs)) for theirs, mine in zip(there, here, strict=True)
    ]
    rounds = [(first + second) / 2 for first, second in zip(logs[::2], logs[1::2], strict=True)]
    return math.exp(median(rounds))


# The tripwire holds a step to the time that a file names for this GPU.
#
# The time of one machine says nothing about another, and on a shared machine it says little. The
# tripwire catches a step that became much slower while nobody compared it with another revision.
# The file: ``{"format": 1, "steps": {test: {GPU: {"tpot_us": 682.0}}}}``.


OPTION = "--roseinfer-tpot"
UPDATE = "--roseinfer-update-tpot"
TOLERATED = 0.10
"""GPUs of the same name differ by some percent."""
_PROCESSES = 3


def measure_alone(
    plan: Plan, start: Callable[[int], Worker], progress: Progress | None = None
) -> Timings:
    """Time the step of one side in a few processes, one after the other."""
    measuring = Measuring(replace(plan, series_per_process=1))
    for series in range(_PROCESSES):
        measuring.run([start(series)])
        if progress:
            progress.note(partial("{} of {} processes timed".format, series + 1, _PROCESSES))
    return measuring.sides[0]


def exceeded(timings: Timings, file: Path, test: str) -> str:
    """Say by how much the step exceeds its baseline; return "" if it does not."""
    device = timings.ready.device
    if not file.exists():
        raise CannotCompare(f"{OPTION}: {file} is not there; {UPDATE} writes it")
    known = read_steps(file).get(test, {})
    if device not in known:
        raise CannotCompare(
            f"{file} has no time of this step on {device}, it names "
            f"{', '.join(known) or 'no GPU'}. The time of another machine says nothing about this "
            f"one; {UPDATE} records one"
        )
    was, now = float(known[device]["tpot_us"]), _microseconds(timings)
    if now <= (1 + TOLERATED) * was:
        return ""
    return (
        f"a step on {device}: {now:.1f} us, baseline {was:.1f} us in {file}, which is "
        f"{now / was - 1:.0%} more; {TOLERATED:.0%} are tolerated. If that is meant, {UPDATE} "
        "makes it the baseline"
    )


def update(file: Path, test: str, timings: Timings) -> None:
    """Write one time; those of other tests and GPUs stay."""
    steps = read_steps(file)
    entry = {"tpot_us": round(_microseconds(timings), 1)}
    steps.setdefault(test, {})[timings.ready.device] = entry
    write_steps(file, steps)


def _microseconds(timings: Timings) -> float:
    return 1e6 * median(timings.series_tpot)
