"""Object of the fixture ``roseinfer_tpot``, which times a decode step."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates import paired_timing as absolute
from pytest_roseinfer.gates.gate import CannotCompare, terminal_of
from pytest_roseinfer.gates.history import HistoryGate
from pytest_roseinfer.gates.paired_timing import Plan, Progress, Verdict, compare
from pytest_roseinfer.gates.timing_gate import NEXT_TO_OTHERS, TimingGate
from pytest_roseinfer.gates.timing_report import TimedComparison, side_fields, verdict_fields
from pytest_roseinfer.gates.worker_process import (
    MAX_PAIRS,
    CpuClock,
    GpuClock,
    MissingStep,
    Side,
    WorkerProcess,
    cpus_for,
    pairs_side_by_side,
    start_ahead,
)

_NO_OPTION = (
    "nothing to compare with: add --roseinfer-against REF, --roseinfer-noise-floor or "
    "--roseinfer-tpot FILE"
)


class Tpot:
    """Timing of one test's decode step, by the command line's options."""

    def __init__(self, request: pytest.FixtureRequest, marked: dict[str, Any]) -> None:
        """Make the gate of a test; ``marked`` holds the arguments of its markers."""
        self.checked = False
        self._request = request
        self._test = request.node.nodeid
        self._gate = TimingGate.of(request.config)
        self._settings = settings.current()
        self._cpus = marked.pop("cpus", None if self._settings.gpu else 1)
        self._plan = Plan(**marked)

    def check(self, factory: str) -> None:
        """Fail if the step of ``factory``, given as ``module:function``, has become slower.

        Both sides import it, each in its own process and from its own tree. The function takes
        no arguments and returns ``{"step": call_me, "tokens": 8}``, where each call does one
        decode step of that many tokens. Optional keys are ``floor_seconds``, a lower bound of a
        step's time; ``path_counts``, a function that returns counts of your own; and ``clock``,
        which replaces the host's clock where that cannot time the device.
        """
        if self.checked:
            raise ValueError(f"{self._test}: already timed a step; a test can time one")
        self.checked = True
        timing = self._settings.timing
        if not timing.requested:
            pytest.skip(_NO_OPTION)
        if hasattr(self._request.config, "workerinput"):
            pytest.skip(NEXT_TO_OTHERS)
        try:
            if not all(factory.partition(":")):
                raise CannotCompare(f"check({factory!r}): expected 'module:function'")
            if timing.paired:
                self._compare_unless_new(factory)
            if timing.tpot:
                self._hold_to_baseline(factory, Path(timing.tpot))
        except CannotCompare as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None

    def _compare_unless_new(self, factory: str) -> None:
        """Compare the sides; a step that the other side lacks is new and passes."""
        _, here = self._gate.sides
        try:
            self._compare(factory)
        except MissingStep as lacking:
            if lacking.side is here:
                raise
            self._gate.new_step(f"{self._test}: new, nothing to compare with: {lacking}")
            if self._settings.timing.folder:
                HistoryGate.of(self._request.config).has_new_steps = True

    def _compare(self, factory: str) -> None:
        timing = self._settings.timing
        there, here = self._gate.sides
        plan = self._plan
        if timing.seconds:
            plan = replace(plan, seconds=timing.seconds, hard_end=True)
        if timing.noise_floor:  # run to the end, even if the ratio is clear earlier
            plan = replace(plan, interim_analyses=plan.interim_analyses[-1:])

        def start(pair: int) -> tuple[WorkerProcess, WorkerProcess]:
            return self._worker(there, factory, pair), self._worker(here, factory, pair)

        progress = self._progress()
        with start_ahead(start, min(MAX_PAIRS, pairs_side_by_side(self._cpus))) as pairs:
            comparison = compare(plan, pairs, self._clock().doubt, progress=progress)
        timed = TimedComparison(
            self._test, there.label, comparison, plan.margin, timing.noise_floor
        )
        self._gate.results.append(timed)
        if timing.folder:
            HistoryGate.of(self._request.config).timed.append(timed)
        _record(self._request, timed)
        tolerated = timing.noise_floor or timing.report_slower
        if comparison.verdict is Verdict.SLOWER and not tolerated:
            pytest.fail(
                f"SLOWER than {there.label}: a step takes {comparison.ratio:.3f} times as long "
                f"({comparison.interval}), and {1 + plan.margin:.3f} are tolerated",
                pytrace=False,
            )

    def _hold_to_baseline(self, factory: str, file: Path) -> None:
        """Time the step in the same way as the file's times, even after a paired comparison."""
        if not self._settings.gpu:
            raise CannotCompare(f"{absolute.OPTION}: needs a GPU; add --roseinfer-gpu")
        clock = self._clock()
        _, here = self._gate.sides
        timings = absolute.measure_alone(
            self._plan, lambda number: self._worker(here, factory, number), self._progress()
        )
        doubt = clock.doubt()
        if self._settings.timing.update_tpot:
            absolute.update(file, self._test, timings)
            self._gate.held_to_baseline(f"written: {file}")
            return
        more = absolute.describe_excess(timings, file, self._test)
        if more and not doubt:
            pytest.fail(more, pytrace=False)
        verdict = f"UNDECIDED because {doubt}" if doubt else f"within its baseline in {file}"
        self._gate.held_to_baseline(f"{self._test}: {verdict}")

    def _worker(self, side: Side, factory: str, number: int) -> WorkerProcess:
        return WorkerProcess(
            side,
            factory,
            file=_file_of(factory.partition(":")[0]),
            cuda=self._settings.gpu,
            cpus=cpus_for(number, self._cpus),
        )

    def _progress(self) -> Progress:
        print_status = terminal_of(self._request.config)
        return Progress(lambda line: print_status(f"{self._test}: {line}"))

    def _clock(self) -> CpuClock | GpuClock:
        return GpuClock(self._settings.gpu_index or 0) if self._settings.gpu else CpuClock()


def _record(request: pytest.FixtureRequest, timed: TimedComparison) -> None:
    """Record both sides with the fixture ``benchmark``, so that its plugin can save and compare.

    The fixture runs one function to completion, but the sides take turns. So it gets the results
    of each side again, series by series, on a fake clock; its table then agrees with the verdict.
    """
    now = 0.0

    def pass_series() -> None:
        nonlocal now
        now += next(series)

    existing = request.node.get_closest_marker("benchmark")
    options = {"group": request.node.nodeid, **(existing.kwargs if existing else {})}
    marker = pytest.mark.benchmark(**options | {"timer": lambda: now})
    request.node.add_marker(marker, append=False)
    benchmark: Any = request.getfixturevalue("benchmark")
    there = copy.copy(benchmark)
    there.name, there.fullname = f"{benchmark.name} (there)", f"{benchmark.fullname} (there)"
    for fixture, (_, timings, paired) in zip((there, benchmark), timed.sides(), strict=True):
        fixture.extra_info = {**side_fields(timings, paired), **verdict_fields(timed)}
        series = cycle(paired)  # profiling repeats some
        fixture.pedantic(pass_series, rounds=len(paired))


def _file_of(module: str) -> str:
    """Return the file of a module in this process, importing only its parent packages; or ""."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return spec.origin or "" if spec else ""
