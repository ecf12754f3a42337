"""At the end of a run the figures of its gates join those of the runs before."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.gates.gate import CannotCompare, Gate, show_problems
from pytest_roseinfer.gates.history.circumstances import commit_of, environment_here
from pytest_roseinfer.gates.history.history_chart import History
from pytest_roseinfer.gates.history.kept_runs import KeptRun, append_run, read_runs
from pytest_roseinfer.gates.time import timing_plot
from pytest_roseinfer.gates.time.timing_report import entry_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from pytest_roseinfer.gates.time.timing_report import Timed
    from pytest_roseinfer.gates.work.step_work import CostVerdict, StepWork

OPTION = "--roseinfer-timings"


class HistoryGate(Gate):
    """Fails a run that was to keep figures and had none."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.timed: list[Timed] = []
        self.found_new = False
        """A step of this run has nothing to be compared with, and so no figures."""
        self._work: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._chart = ""

    def keep_work(
        self, where: tuple[str, str, str], work: StepWork, verdict: CostVerdict | None
    ) -> None:
        """Keep the counts of a step; ``verdict`` is what a baseline said of them, if one did."""
        test, step, device = where
        self._work.append(
            {
                "test": test,
                "step": step,
                "device": device,
                "tokens": work.tokens,
                "counts": {name: sum(each.values()) for name, each in work.groups.items()},
                "more": verdict.worse if verdict else [],
                "less": verdict.less if verdict else [],
            }
        )

    def to_json(self) -> list[dict[str, Any]]:
        return self._work

    def add(self, seen: list[dict[str, Any]]) -> None:
        self._work += seen

    def judge(self, *, passed: bool) -> Sequence[str]:
        folder = settings.current().timing.folder
        assert folder
        if not (self.timed or self._work):
            missing = passed and not self.found_new
            return [f"{OPTION}: no test of this run timed or counted a step"] if missing else []
        try:
            self._keep(Path(folder))
        except (CannotCompare, OSError) as error:
            return [f"{OPTION} {folder}: {error}"]
        return []

    def _keep(self, folder: Path) -> None:
        commit, changed = commit_of(self.config.rootpath)
        run = KeptRun(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            changed=changed,
            environment=environment_here(gpu=settings.current().gpu),
            times=[entry_of(each) for each in self.timed],
            work=self._work,
        )
        self._lines.append(f"written: {append_run(folder, run)}")
        runs = read_runs(folder)
        if self.timed:
            why_not = timing_plot.draw(folder, self.timed, runs)
            self._lines.append(why_not or f"written: {folder / timing_plot.NAME}")
        if settings.current().reports:
            self._draw(runs)

    def _draw(self, runs: Sequence[KeptRun]) -> None:
        """Draw the chart for the page of the run, or say what is missing for it."""
        try:
            history = History.of(runs)
            drawn = history.chart() if history.drawn else ""
        except CannotCompare as error:
            self._lines.append(str(error))
            return
        self._chart = drawn[drawn.find("<svg") :]  # what comes before is for a file of its own

    def figures(self) -> Mapping[str, str]:
        return {"What runs kept of their gates": self._chart} if self._chart else {}

    def in_markdown(self) -> Iterable[str]:
        return [f"- {line}" for line in self._lines]

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if self._lines or self.problems:
            reporter.section("roseinfer: figures kept")
            for line in self._lines:
                reporter.line(line)
            show_problems(reporter, self.problems)
