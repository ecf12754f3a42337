"""What one run of pytest timed, and what the end of it makes of that.

A plugin of its own, registered by the first test that takes the fixture, or where the command
line asks for a timing: other runs have nothing of it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.time import timing_report
from pytest_roseinfer.gates.time.sides import other_side, this_side

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_roseinfer.gates.time.timing_report import Timed
    from pytest_roseinfer.gates.time.worker_process import Side

_PLUGIN = "roseinfer-timing"
NEXT_TO_OTHERS = (
    "decode steps are not timed by workers of pytest-xdist, which would time each other: run "
    "them without -n"
)


class TimingRun:
    """Holds the two sides of a run, and adds up what its tests found."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._built = ExitStack()
        self._sides: tuple[Side, Side] | None = None
        self._results: list[Timed] = []
        self._lines: list[str] = []
        self._absolutes = 0
        self._problem = ""

    @staticmethod
    def of(config: pytest.Config) -> TimingRun:
        run = config.pluginmanager.get_plugin(_PLUGIN)
        if run is None:
            run = TimingRun(config)
            config.pluginmanager.register(run, _PLUGIN)
        assert isinstance(run, TimingRun)
        return run

    def sides(self) -> tuple[Side, Side]:
        """There and here; without a revision to compare with, here twice."""
        if self._sides is None:
            started_in = self._config.invocation_params.dir
            # Without an ini file, pytest takes the folder of the other side into account.
            folder = self._config.rootpath if self._config.inipath else started_in
            here = this_side(folder, [str(started_in), *sys.path])
            reference = settings.current().timing.against
            there = here
            if reference:
                there = self._built.enter_context(other_side(reference, here, folder))
            self._sides = there, here
        return self._sides

    def compared(self, timed: Timed) -> None:
        self._results.append(timed)

    def held_to_baseline(self, line: str) -> None:
        """A step's time was compared with the baseline of this GPU, or became it."""
        self._absolutes += 1
        self._lines.append(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        tpot = getattr(item, "funcargs", {}).get("roseinfer_tpot")
        if tpot is not None and not tpot.checked:
            pytest.fail("the test took roseinfer_tpot and timed no step with it", pytrace=False)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        self._lines += filter(None, (timed.in_words() for timed in self._results))
        self._problem = self._write()
        if session.exitstatus == pytest.ExitCode.OK and not self._config.getoption("collectonly"):
            self._problem = self._problem or self._nothing_done()
            if self._problem:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        timing_report.add_github_summary(self._results, self._lines)

    def _write(self) -> str:
        """Keep the results where the command line says; why that failed, if so."""
        where = settings.current().timing.folder
        if not (where and self._results):
            return ""
        from pytest_roseinfer.gates.time import timing_plot

        folder = Path(where)
        try:
            self._lines.append(f"written: {timing_report.write(folder, self._results)}")
            self._lines.append(timing_plot.draw(folder) or f"written: {folder / timing_plot.NAME}")
        except (OSError, ValueError, KeyError) as error:
            return f"--roseinfer-timings {folder}: {error!r}"
        return ""

    def _nothing_done(self) -> str:
        """Why a run that was asked for a gate is no pass, if it is none."""
        asked = settings.current().timing
        problem = ""
        if (asked.against or asked.noise_floor) and not self._results:
            option = "--roseinfer-against" if asked.against else "--roseinfer-noise-floor"
            problem = f"{option}: no test of this run compared a step"
        elif asked.tpot and not self._absolutes:
            problem = "--roseinfer-tpot: no test of this run compared a step with its baseline"
        if problem and self._config.getoption("numprocesses", None):
            problem += f"; {NEXT_TO_OTHERS}"
        return problem

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not (self._results or self._lines or self._problem):
            return
        terminalreporter.section("roseinfer: times of decode steps")
        if self._results:
            terminalreporter.line(f"there: {self._results[0].there}")
            terminalreporter.line(timing_report.table(self._results, "simple"))
        for line in self._lines:
            terminalreporter.line(line)
        if self._problem:
            terminalreporter.line(f"FAILED: {self._problem}", red=True)

    def pytest_unconfigure(self) -> None:
        self._built.close()
