"""What the work counters compared in one run of pytest, and what the end of it makes of that.

A plugin of its own, registered by the first test that counts, or where the command line asks
for the gate: other runs have nothing of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.work.cost_file import UPDATE, write_costs
from pytest_roseinfer.gates.work.step_work import CannotCompare
from pytest_roseinfer.report.github_summary import add_to_github_summary

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_roseinfer.gates.work.cost_file import Where

_PLUGIN = "roseinfer-costs"


class CostRun:
    """Adds up what the tests of this run, and of its workers, have compared."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._problem = ""
        self._written: list[str] = []
        self._compared = 0
        self._less: list[str] = []
        self._more: list[str] = []
        self._measured: list[tuple[str, Where, dict[str, Any]]] = []

    @staticmethod
    def of(config: pytest.Config) -> CostRun:
        run = config.pluginmanager.get_plugin(_PLUGIN)
        if run is None:
            run = CostRun(config)
            config.pluginmanager.register(run, _PLUGIN)
        assert isinstance(run, CostRun)
        return run

    def compared(self, less: str) -> None:
        """A step did no more than its baseline; ``less`` says in words where it did less."""
        self._compared += 1
        if less:
            self._less.append(less)

    def more(self, said: str) -> None:
        """A step did more than its baseline, as the failure of its test says."""
        self._more.append(said)

    def measured(self, file: Path, where: Where, entry: dict[str, Any]) -> None:
        """A step's work is to stand in ``file``, written once at the end of the run."""
        self._measured.append((str(file), where, entry))

    def add(self, output: dict[str, Any]) -> None:
        """What a worker saw. Only the controller writes, so that workers lose nothing."""
        self._compared += output["compared"]
        self._less += output["less"]
        self._more += output["more"]
        self._measured += [(file, tuple(where), entry) for file, where, entry in output["measured"]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        costs = getattr(item, "funcargs", {}).get("roseinfer_costs")
        if costs is not None and not costs.checked:
            pytest.fail("the test took roseinfer_costs and checked no step with it", pytrace=False)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[settings.WORKER_COSTS] = {
                "compared": self._compared,
                "less": self._less,
                "more": self._more,
                "measured": [[file, list(where), entry] for file, where, entry in self._measured],
            }
            return
        self._problem = self._write()
        if session.exitstatus == pytest.ExitCode.OK and not self._config.getoption("collectonly"):
            self._problem = self._problem or self._nothing_done()
            if self._problem:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._tell_github()

    def _tell_github(self) -> None:
        said = [*self._more, *self._less, *filter(None, [self._problem])]
        if said or self._compared:
            compared = f"- {self._compared} did no more than their baselines say"
            blocks = (f"```\n{each}\n```" for each in said)
            add_to_github_summary(["### roseinfer: work of steps", "", compared, "", *blocks])

    def _write(self) -> str:
        """Write what was measured; why not all of it, if so."""
        for file in sorted({file for file, _, _ in self._measured}):
            own = [(where, new) for at, where, new in self._measured if at == file]
            try:
                write_costs(Path(file), own)
            except (CannotCompare, OSError) as error:
                return f"{UPDATE}: {error}"
            self._written.append(file)
        return ""

    def _nothing_done(self) -> str:
        """Why a run that was asked for the gate is no pass, if it is none."""
        asked = settings.current()
        if asked.update_costs and not self._measured:
            return f"{UPDATE}: no test of this run measured a step"
        if asked.costs_requested and not (self._compared or self._measured):
            return "--roseinfer-costs: no test of this run compared a step with its baseline"
        return ""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not (self._compared or self._written or self._problem):
            return
        terminalreporter.section("roseinfer: work of steps")
        if self._compared:
            terminalreporter.line(f"{self._compared} did no more than their baselines say")
        for line in self._less:
            terminalreporter.line(line, yellow=True)
        if self._less:
            terminalreporter.line(f"{UPDATE} makes these their baselines", yellow=True)
        for file in self._written:
            terminalreporter.line(f"written: {file}")
        if self._problem:
            terminalreporter.line(f"FAILED: {self._problem}", red=True)
