"""What the fixture ``roseinfer_tpot`` hands to a test."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates import paired as absolute
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.history import HistoryGate
from pytest_roseinfer.gates.paired import Plan, Progress, Verdict, compare, terminal_of
from pytest_roseinfer.gates.timing_gate import NEXT_TO_OTHERS, TimingGate
from pytest_roseinfer.gates.timing_report import Timed, facts, judged
from pytest_roseinfer.gates.worker_process import (
    MOST_PAIRS,
    CpuClock,
    GpuClock,
    LacksStep,
    Side,
    WorkerProcess,
    cpus_for,
    pairs_side_by_side,
    started_ahead,
)

_NOTHING_ASKED = (
    "nothing to compare with: --roseinfer-against REF, --roseinfer-noise-floor or "
    "--roseinfer-tpot FILE"
)


class Tpot:
    """Times the decode step of one test, as the command line asks."""

    def __init__(self, request: pytest.FixtureRequest, marked: dict[str, Any]) -> None:
        """``marked`` holds the arguments of the test's markers."""
        self.checked = False
        self._request = request
        self._test = request.node.nodeid
        self._gate = TimingGate.of(request.config)
        self._asked = settings.current()
        self._cpus = marked.pop("cpus", None if self._asked.gpu else 1)
        self._plan = Plan(**marked)

    def check(self, factory: str) -> None:
        """Fail if the step that ``factory`` makes, as ``module:function``, has become slower.

        Both sides import it, each in a process of its own and from its own tree. The function
        takes nothing and returns ``{"step": call_me, "tokens": 8}``, where each call does one
        decode step that brings so many tokens. It may add ``floor_seconds``, which a step
        cannot beat; ``path_counts``, to be called for numbers of your own; and ``clock``, in
        place of the host's, where that says nothing about the device.
        """
        if self.checked:
            raise ValueError(f"{self._test} has timed a step already")
        self.checked = True
        asked = self._asked.timing
        if not asked.requested:
            pytest.skip(_NOTHING_ASKED)
        if hasattr(self._request.config, "workerinput"):
            pytest.skip(NEXT_TO_OTHERS)
        try:
            if not all(factory.partition(":")):
                raise CannotCompare(f"check('module:function') was given {factory!r}")
            if asked.paired:
                self._compare_unless_new(factory)
            if asked.tpot:
                self._hold_to_baseline(factory, Path(asked.tpot))
        except CannotCompare as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None

    def _compare_unless_new(self, factory: str) -> None:
        """Compare the sides; a step that the other does not have is new, and passes."""
        _, here = self._gate.sides
        try:
            self._compare(factory)
        except LacksStep as lacking:
            if lacking.side is here:
                raise
            self._gate.new_step(f"{self._test}: new, nothing to compare with: {lacking}")
            if self._asked.timing.folder:
                HistoryGate.of(self._request.config).found_new = True

    def _compare(self, factory: str) -> None:
        asked = self._asked.timing
        there, here = self._gate.sides
        plan = self._plan
        if asked.seconds:
            plan = replace(plan, seconds=asked.seconds, hard_end=True)
        if asked.noise_floor:  # goes to its end, even if the ratio is clear before
            plan = replace(plan, looks=plan.looks[-1:])

        def start(pair: int) -> tuple[WorkerProcess, WorkerProcess]:
            return self._worker(there, factory, pair), self._worker(here, factory, pair)

        progress = self._progress()
        with started_ahead(start, min(MOST_PAIRS, pairs_side_by_side(self._cpus))) as pairs:
            comparison = compare(plan, pairs, self._clock().doubt, progress=progress)
        timed = Timed(self._test, there.label, comparison, plan.margin, asked.noise_floor)
        self._gate.results.append(timed)
        if asked.folder:
            HistoryGate.of(self._request.config).timed.append(timed)
        _record(self._request, timed)
        tolerated = asked.noise_floor or asked.report_slower
        if comparison.verdict is Verdict.SLOWER and not tolerated:
            pytest.fail(
                f"SLOWER than {there.label}: a step takes {comparison.ratio:.3f} times as long "
                f"({comparison.interval}), and {1 + plan.margin:.3f} are tolerated",
                pytrace=False,
            )

    def _hold_to_baseline(self, factory: str, file: Path) -> None:
        """Time the step anew, even after a comparison, in the way the file's times were taken."""
        if not self._asked.gpu:
            raise CannotCompare(f"{absolute.OPTION} is about GPUs: run with --roseinfer-gpu")
        clock = self._clock()
        _, here = self._gate.sides
        timings = absolute.measure_alone(
            self._plan, lambda number: self._worker(here, factory, number), self._progress()
        )
        doubt = clock.doubt()
        if self._asked.timing.update_tpot:
            absolute.update(file, self._test, timings)
            self._gate.held_to_baseline(f"written: {file}")
            return
        more = absolute.exceeded(timings, file, self._test)
        if more and not doubt:
            pytest.fail(more, pytrace=False)
        verdict = f"UNDECIDED because {doubt}" if doubt else f"within its baseline in {file}"
        self._gate.held_to_baseline(f"{self._test}: {verdict}")

    def _worker(self, side: Side, factory: str, number: int) -> WorkerProcess:
        return WorkerProcess(
            side,
            factory,
            file=_file_of(factory.partition(":")[0]),
            cuda=self._asked.gpu,
            cpus=cpus_for(number, self._cpus),
        )

    def _progress(self) -> Progress:
        say = terminal_of(self._request.config)
        return Progress(lambda line: say(f"{self._test}: {line}"))

    def _clock(self) -> CpuClock | GpuClock:
        return GpuClock(self._asked.gpu_index or 0) if self._asked.gpu else CpuClock()


def _record(request: pytest.FixtureRequest, timed: Timed) -> None:
    """Record both sides with the fixture ``benchmark``, so that its plugin can save and compare.

    The fixture runs one function until it is done with it, and our sides take turns. So it gets
    what the comparison found of each side once more, series by series, on a clock of its own: its
    table then says the same as the verdict.
    """
    now = 0.0

    def pass_series() -> None:
        nonlocal now
        now += next(series)

    said = request.node.get_closest_marker("benchmark")
    options = {"group": request.node.nodeid, **(said.kwargs if said else {})}
    marker = pytest.mark.benchmark(**options | {"timer": lambda: now})
    request.node.add_marker(marker, append=False)
    benchmark: Any = request.getfixturevalue("benchmark")
    there = copy.copy(benchmark)
    there.name, there.fullname = f"{benchmark.name} (there)", f"{benchmark.fullname} (there)"
    for fixture, (_, timings, paired) in zip((there, benchmark), timed.sides(), strict=True):
        fixture.extra_info = {**facts(timings, paired), **judged(timed)}
        series = cycle(paired)  # profiling takes some again
        fixture.pedantic(pass_series, rounds=len(paired))


def _file_of(module: str) -> str:
    """Find the file of a module here, importing no more than the packages it is in."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return spec.origin or "" if spec else ""
