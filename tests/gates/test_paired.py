"""The paired comparison on simulated machines, and on simulated clocks."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from dataclasses import replace
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.paired_timing import (
    UNBOUNDED,
    Comparison,
    InterimAnalysis,
    Interval,
    Plan,
    Progress,
    Timings,
    Verdict,
    describe_duration,
    describe_progress,
    median_interval,
    paired_ratio,
    verdict_of,
)
from pytest_roseinfer.gates.paired_timing import compare as compare_sides
from pytest_roseinfer.gates.timing_report import TimedComparison
from pytest_roseinfer.gates.worker_process import (
    Ready,
    Side,
    WorkerProcess,
    cpus_for,
    pairs_side_by_side,
    start_ahead,
)
from tests.gates.simulated import READY, Machine, SimulatedWorker, compare, pairs_of, quiet

if TYPE_CHECKING:
    from pathlib import Path


def verdicts(runs: int, slower: float) -> Counter[Verdict]:
    return Counter(compare(Machine(seed), slower).verdict for seed in range(runs))


def test_step_against_itself_is_never_slower() -> None:
    counts = verdicts(30, 1.0)
    assert counts[Verdict.SLOWER] == counts[Verdict.FASTER] == 0
    assert counts[Verdict.SAME] >= 25


def test_five_percent_more_time_is_slower() -> None:
    assert verdicts(40, 1.05)[Verdict.SLOWER] >= 38


@pytest.mark.slow
def test_slowdown_of_the_margin_is_tolerated() -> None:
    assert verdicts(30, 1.02)[Verdict.SLOWER] == 0


def test_five_percent_less_time_is_faster() -> None:
    assert verdicts(20, 1 / 1.05)[Verdict.FASTER] >= 18


def test_drift_of_both_sides_cancels() -> None:
    """The machine becomes a third slower during the comparison."""
    comparison = compare(quiet(drift=0.001), 1.0)
    assert max(comparison.here.series_tpot) > 1.3 * min(comparison.here.series_tpot)
    assert comparison.verdict is Verdict.SAME
    assert comparison.ratio == pytest.approx(1, abs=1e-3)


def test_comparison_ends_once_decided() -> None:
    assert len(compare(quiet(), 1.0).ratios) == Plan().interim_analyses[0].series
    noisy = compare(Machine(1, process_noise=0.2), 1.0)
    assert noisy.verdict is Verdict.UNDECIDED
    assert len(noisy.ratios) == Plan().interim_analyses[-1].series


def test_budget_ends_a_comparison_after_its_first_analysis() -> None:
    hours = iter(range(0, 10**9, 3600))
    comparison = compare(Machine(1, process_noise=0.2), 1.0, clock=lambda: float(next(hours)))
    assert comparison.verdict is Verdict.UNDECIDED
    assert len(comparison.ratios) == Plan().interim_analyses[0].series


def compare_until(seconds: float, *, series_seconds: float) -> Comparison:
    """Compare a step with itself, on a clock that only series advance."""
    now, pairs = [0.0], pairs_of(quiet(), 1.0)

    def start(series: int) -> tuple[SimulatedWorker, SimulatedWorker]:
        now[0] += series_seconds
        return pairs(series)

    plan = replace(Plan(), seconds=seconds, hard_end=True)
    return compare_sides(plan, start, clock=lambda: now[0])


def test_hard_end_limits_the_time() -> None:
    comparison = compare_until(20, series_seconds=3)
    assert (len(comparison.ratios), comparison.seconds, comparison.missed_analysis) == (6, 18, 13)
    assert comparison.verdict is Verdict.UNDECIDED
    assert comparison.interval == UNBOUNDED
    text = TimedComparison("test", "there", comparison, 0.02).in_words()
    assert text == (
        "test: UNDECIDED after 6 series and 18 s: too short for an interval, which needs "
        "13 series, about 39 s here"
    )


def test_hard_end_does_not_affect_an_earlier_decision() -> None:
    comparison = compare_until(39, series_seconds=3)
    assert comparison.verdict is Verdict.SAME
    assert comparison.missed_analysis == 0


def test_hard_end_allows_the_first_series() -> None:
    assert len(compare_until(20, series_seconds=3600).ratios) == 1


def test_long_comparison_reports_progress() -> None:
    lines: list[str] = []
    progress = Progress(lines.append, itertools.count().__next__)
    compare_sides(Plan(), pairs_of(quiet(), 1.5), progress=progress)
    assert lines[0] == "2 series, next analysis after 13: here / there 1.500 (2 s)"
    assert lines[-1] == "12 series, next analysis after 13: here / there 1.500 (12 s)"
    assert len(lines) == 3
    lines.clear()
    compare_sides(Plan(), pairs_of(quiet(), 1.5), progress=Progress(lines.append, lambda: 0.0))
    assert lines == []


def test_duration_of_a_slow_comparison_is_announced_after_its_first_series() -> None:
    lines: list[str] = []
    progress = Progress(lines.append, lambda: 0.0)
    compare_sides(Plan(), pairs_of(quiet(), 1.5), clock=count(0, 4.5).__next__, progress=progress)
    assert lines == ["a series takes 13.5 s: a verdict comes after 176 to 300 s"]


@pytest.mark.parametrize(
    ("plan", "series_seconds", "words"),
    [
        (Plan(), 0.1, ""),
        (Plan(), 1.0, "a series takes 1.0 s: a verdict comes after 13 to 60 s"),
        (Plan(), 30.0, "a series takes 30.0 s: a verdict comes after 390 s"),
        (
            Plan(seconds=60, hard_end=True),
            9.0,
            "a series takes 9.0 s: no verdict comes within 60 s, since the first needs 117 s",
        ),
    ],
)
def test_duration_depends_on_the_time_limit(plan: Plan, series_seconds: float, words: str) -> None:
    assert describe_duration(plan, series_seconds) == words


def test_progress_includes_the_interval_once_known() -> None:
    assert describe_progress([1.0] * 12, InterimAnalysis(13, 0.0002)).endswith("here / there 1.000")
    assert describe_progress([1.0] * 13, InterimAnalysis(20, 0.0006)).endswith(
        "here / there 1.000, in 1.000 to 1.000"
    )


def test_doubt_about_the_clock_makes_the_verdict_undecided() -> None:
    comparison = compare(quiet(), 1.5, doubt=lambda: "it was hot")
    assert comparison.verdict is Verdict.UNDECIDED
    assert comparison.doubt == "it was hot"
    assert comparison.ratio == pytest.approx(1.5)


def test_errors_of_all_analyses_add_up_to_the_limit() -> None:
    interim_analyses = Plan().interim_analyses
    assert sum(analysis.error for analysis in interim_analyses) <= 1 / 200
    for analysis in interim_analyses:  # a decision is possible in each
        assert median_interval([1.0] * analysis.series, analysis.error) == Interval(1.0, 1.0)


def test_each_series_has_its_own_processes_and_all_are_stopped() -> None:
    workers: list[SimulatedWorker] = []

    def start(_: int) -> tuple[SimulatedWorker, SimulatedWorker]:
        pair = SimulatedWorker(machine, 1e-3), SimulatedWorker(machine, 1e-3)
        workers.extend(pair)
        return pair

    machine = quiet()
    compare_sides(Plan(), start)
    assert len(workers) == 2 * Plan().interim_analyses[0].series
    assert all(worker.stopped for worker in workers)
    workers.clear()
    compare_sides(Plan(series_per_process=5), start)
    assert len(workers) == 2 * math.ceil(Plan().interim_analyses[0].series / 5)


def test_pairs_started_together_are_ready_before_any_is_measured() -> None:
    events: list[str] = []

    class RecordingWorker(SimulatedWorker):
        @property
        def ready(self) -> Ready:
            events.append("ready")
            return READY

        @ready.setter
        def ready(self, _: Ready) -> None: ...

        def stop(self) -> None:
            events.append("stopped")

    def start(number: int) -> tuple[SimulatedWorker, SimulatedWorker]:
        events.append(f"start {number}")
        return RecordingWorker(quiet(), 1e-3), RecordingWorker(quiet(), 1e-3)

    with start_ahead(start, 2) as take:
        assert events == []
        first = take(0)
        assert events == ["start 0", "start 1", *["ready"] * 4]
        assert take(1)[0] is not first[0]
        assert len(events) == 6
        take(2)
        assert events[6:] == ["start 2", "start 3", *["ready"] * 4]
        assert "stopped" not in events
    assert events[12:] == ["stopped"] * 2  # the fourth pair, which was not used


def test_unused_pairs_are_stopped_after_an_error() -> None:
    workers: list[SimulatedWorker] = []

    class Broken(SimulatedWorker):
        @property
        def ready(self) -> Ready:
            raise CannotCompare("no weights")

        @ready.setter
        def ready(self, _: Ready) -> None: ...

    def start(number: int) -> tuple[SimulatedWorker, SimulatedWorker]:
        kind = Broken if number else SimulatedWorker
        workers.extend((kind(quiet(), 1e-3), kind(quiet(), 1e-3)))
        return workers[-2], workers[-1]

    with pytest.raises(CannotCompare, match="no weights"), start_ahead(start, 2) as take:
        take(0)
    assert [worker.stopped for worker in workers] == [True] * 4


def test_pairs_side_by_side_have_their_own_cpus() -> None:
    assert pairs_side_by_side(1, [0, 1, 2]) == 3
    assert pairs_side_by_side(2, [0, 1, 2]) == 1
    assert pairs_side_by_side(4, [0, 1]) == 1
    assert pairs_side_by_side(1, []) == pairs_side_by_side(None, [0, 1]) == 1


def test_processes_are_stopped_after_an_error() -> None:
    other = replace(READY, tokens=8)
    pair = SimulatedWorker(Machine(1), 1e-3), SimulatedWorker(Machine(1), 1e-3, ready=other)
    with pytest.raises(CannotCompare, match="8 tokens here and 4 there"):
        compare_sides(Plan(), lambda _: pair)
    assert all(worker.stopped for worker in pair)


def test_sides_have_equal_turns_in_alternating_order() -> None:
    order = []

    class RecordingWorker(SimulatedWorker):
        def seconds(self, steps: int) -> list[float]:
            order.append(self.step_seconds)
            return super().seconds(steps)

    machine = quiet()
    plan = Plan(rounds=2)
    compare_sides(plan, lambda _: (RecordingWorker(machine, 1.0), RecordingWorker(machine, 1.01)))
    assert order[-8:] == [1.0, 1.01, 1.01, 1.0] * 2


def test_paired_ratio_is_the_median_of_rounds() -> None:
    there = [[1.0], [1.0], [2.0], [2.0], [9.0], [1.0]]
    here = [[1.1], [1.1], [2.2], [2.2], [1.0], [1.1]]
    assert paired_ratio(there, here) == pytest.approx(1.1)


def test_paired_times_agree_with_the_ratio() -> None:
    """The machine is slower in every series than in the previous one."""
    there = Timings(READY, series_tpot=[1.0, 2.0, 3.0, 4.0, 5.0])
    here = Timings(READY, series_tpot=[3.0, 1.0, 4.0, 2.0, 9.0])
    ratios = (3.0, 0.5, 4 / 3, 0.5, 1.8)
    comparison = Comparison(there, here, ratios, Interval(0.5, 3.0), Verdict.UNDECIDED, "", 1.0)
    assert median(here.series_tpot) == median(there.series_tpot)  # the medians hide the ratio
    paired_there, paired_here = comparison.paired_tpot
    assert median(paired_here) / median(paired_there) == pytest.approx(4 / 3)
    assert median(paired_here) * median(paired_there) == pytest.approx(8)  # of the second series


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.021, 1.2, Verdict.SLOWER),
        (1.019, 1.2, Verdict.UNDECIDED),
        (0.99, 1.019, Verdict.SAME),
        (0.97, 1.01, Verdict.UNDECIDED),
        (0.9, 0.979, Verdict.FASTER),
        (0.9, 0.99, Verdict.UNDECIDED),
    ],
)
def test_verdict_follows_from_the_interval(low: float, high: float, verdict: Verdict) -> None:
    assert verdict_of(Interval(low, high), 0.02) is verdict


def test_interval_of_few_values_is_conservative() -> None:
    """All of 10 values lie above the median once in 1024: at an error of 0.001 all are needed."""
    values = [float(value) for value in range(10)]
    assert median_interval(values, 0.001) == Interval(0.0, 9.0)
    assert median_interval(values[:9], 0.001) == UNBOUNDED


@pytest.mark.slow
def test_interval_covers_the_median_at_its_confidence() -> None:
    """The noise is exponential with median log 2, and skewed, as times are."""
    import math
    import random

    draw = random.Random(3)
    outside = 0
    for _ in range(200):
        interval = median_interval([draw.expovariate(1) for _ in range(17)], 0.05)
        outside += not interval.low <= math.log(2) <= interval.high
    assert 2 <= outside <= 20  # expected 10% of 200


def test_interval_is_deterministic() -> None:
    values = [1.0, 1.01, 0.99, 1.03, 1.0, 0.98, 1.2, 1.02, 1.0, 1.01, 0.97]
    assert median_interval(values, 0.01) == median_interval(values, 0.01)


def test_noise_floor_uses_all_series_and_names_the_detectable_slowdown() -> None:
    comparison = compare(
        Machine(1), 1.0, replace(Plan(), interim_analyses=Plan().interim_analyses[-1:])
    )
    assert len(comparison.ratios) == Plan().interim_analyses[-1].series
    half_width = (comparison.interval.high - comparison.interval.low) / 2
    timed = TimedComparison("test", "here", comparison, 0.02, noise_floor=True)
    assert f"of {0.02 + half_width:.1%} is found half of the time" in timed.in_words()
    doubtful = replace(timed, comparison=replace(comparison, doubt="it was hot"))
    assert doubtful.in_words().endswith(": it was hot")


def test_sides_of_a_series_share_cpus_and_series_alternate() -> None:
    assert [cpus_for(series, 1, [2, 5]) for series in range(3)] == [(2,), (5,), (2,)]
    assert cpus_for(1, 2, [0, 1, 2]) == (2, 0)
    assert cpus_for(0, 2, [0, 1]) == ()  # all CPUs
    assert cpus_for(0, None, [0, 1]) == ()


def test_worker_runs_its_exit_handlers(tmp_path: Path) -> None:
    """A worker keeps its modules, but what a step has open may have to be closed."""
    (tmp_path / "own_step.py").write_text(
        "import atexit\nfrom pathlib import Path\n\n"
        "def decode():\n"
        "    atexit.register(Path(__file__).with_name('left').touch)\n"
        "    return {'step': int, 'tokens': 1}\n"
    )
    worker = WorkerProcess(Side("here", (os.path.realpath(tmp_path),)), "own_step:decode", cpus=())
    assert worker.ready.own_modules == ["own_step"]
    worker.stop()
    assert (tmp_path / "left").exists()
