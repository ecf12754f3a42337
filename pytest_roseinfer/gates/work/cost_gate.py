"""The gate of work: steps held against their baselines, and baselines written anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.gates.gate import Gate, show_problems
from pytest_roseinfer.gates.work.cost_file import UPDATE, write_costs
from pytest_roseinfer.gates.work.step_work import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

    from pytest_roseinfer.gates.work.cost_file import Where

_TITLE = "roseinfer: work of steps"


class CostGate(Gate):
    """Adds up what the tests of this run have compared and measured."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._written: list[str] = []
        self._compared = 0
        self._less: list[str] = []
        self._more: list[str] = []
        self._measured: list[tuple[str, Where, dict[str, Any]]] = []

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

    def to_json(self) -> dict[str, Any]:
        return {
            "compared": self._compared,
            "less": self._less,
            "more": self._more,
            "measured": [[file, list(where), entry] for file, where, entry in self._measured],
        }

    def add(self, seen: dict[str, Any]) -> None:
        self._compared += seen["compared"]
        self._less += seen["less"]
        self._more += seen["more"]
        self._measured += [(file, tuple(where), entry) for file, where, entry in seen["measured"]]

    def judge(self, *, passed: bool) -> Sequence[str]:
        problem = self._write() or (self._nothing_done() if passed else "")
        return [problem] if problem else []

    def _write(self) -> str:
        """Write what was measured; return why not all of it was, if so."""
        for file in sorted({file for file, _, _ in self._measured}):
            own = [(where, new) for at, where, new in self._measured if at == file]
            try:
                write_costs(Path(file), own)
            except (CannotCompare, OSError) as error:
                return f"{UPDATE}: {error}"
            self._written.append(file)
        return ""

    def _nothing_done(self) -> str:
        """Return why a run that was asked for the gate did not apply it, if it did not."""
        asked = settings.current()
        if asked.update_costs and not self._measured:
            return f"{UPDATE}: no test of this run measured a step"
        if asked.costs_requested and not (self._compared or self._measured):
            return "--roseinfer-costs: no test of this run compared a step with its baseline"
        return ""

    def in_markdown(self) -> Iterable[str]:
        said = [*self._more, *self._less, *self.problems]
        if said or self._compared:
            yield from (f"### {_TITLE}", "", f"- {self._count()}", "")
            yield from (f"```\n{each}\n```" for each in said)

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self._compared or self._written or self.problems):
            return
        reporter.section(_TITLE)
        if self._compared:
            reporter.line(self._count())
        for line in self._less:
            reporter.line(line, yellow=True)
        if self._less:
            reporter.line(f"{UPDATE} makes these their baselines", yellow=True)
        for file in self._written:
            reporter.line(f"written: {file}")
        show_problems(reporter, self.problems)

    def _count(self) -> str:
        return f"{self._compared} did no more than their baselines say"
