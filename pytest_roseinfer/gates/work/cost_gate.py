"""The gate of work compares steps with their baselines, or writes new baselines."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.gates.gate import CannotCompare, Gate, show_problems
from pytest_roseinfer.gates.work.cost_file import UPDATE, update
from pytest_roseinfer.gates.work.left_behind import is_of_whole_file, left_behind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

    from pytest_roseinfer.gates.work.cost_file import Where
    from pytest_roseinfer.gates.work.left_behind import Test

_TITLE = "roseinfer: work of steps"
_COLLECTED = ("compared", "less", "more", "bytes", "measured", "tests")


class CostGate(Gate):
    """Tests add what they find to the public attributes."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.compared = 0
        """How many steps did no more than their baselines."""
        self.less: list[str] = []
        """What steps did less of, in words."""
        self.more: list[str] = []
        """What steps did more of, as the failures of their tests say."""
        self.bytes: list[str] = []
        """What steps moved, beside the least, in words."""
        self.measured: list[tuple[str, Where, dict[str, Any]]] = []
        """The baselines to write at the end of the run, each with its file."""
        self.tests: list[Test] = []
        """The tests of this run's files, where all of a file's were collected."""
        self._written: list[str] = []
        self._left_behind: list[str] = []

    def note_collected(self, item: pytest.Item) -> None:
        """Note that there is such a test."""
        if is_of_whole_file(item):
            self.tests.append((str(item.path), item.nodeid.partition("::")[2]))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COLLECTED}

    def add(self, seen: dict[str, Any]) -> None:
        for name in _COLLECTED:
            setattr(self, name, getattr(self, name) + seen[name])

    def judge(self, *, passed: bool) -> Sequence[str]:
        problem = self._write(passed=passed) or (self._nothing_done() if passed else "")
        return [problem] if problem else []

    def _write(self, *, passed: bool) -> str:
        """Write what was measured; return why not all of it was, if so.

        If all passed, each test has measured all of its steps, and those that it has no more show.
        """
        by_file = defaultdict(list)
        for file, where, entry in self.measured:
            by_file[file].append((where, entry))
        for file, entries in sorted(by_file.items()):
            try:
                update(Path(file), entries)
            except (CannotCompare, OSError) as error:
                return f"{UPDATE}: {error}"
            self._written.append(file)
            gone = left_behind(Path(file), self.tests, [where for where, _ in entries])
            names = "; ".join(gone) if passed else ""
            if names:
                self._left_behind.append(
                    f"{file} has baselines that nothing checks: {names}. Delete them there"
                )
        return ""

    def _nothing_done(self) -> str:
        """Return why a run that asked for this gate did not apply it, if so."""
        asked = settings.current()
        if asked.update_costs and not self.measured:
            return f"{UPDATE}: no test of this run measured a step"
        if asked.costs_requested and not (self.compared or self.measured):
            return "--roseinfer-costs: no test of this run compared a step with its baseline"
        return ""

    def in_markdown(self) -> Iterable[str]:
        said = [*self.more, *self.less, *self.problems]
        if said or self.compared:
            yield from (f"### {_TITLE}", "", f"- {self._count()}", "")
            yield from (f"```\n{each}\n```" for each in [*self.bytes, *said])

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self.compared or self.bytes or self._written or self.problems):
            return
        reporter.section(_TITLE)
        if self.compared:
            reporter.line(self._count())
        for line in self.bytes:
            reporter.line(line)
        for line in self.less:
            reporter.line(line, yellow=True)
        if self.less:
            reporter.line(f"{UPDATE} makes these their baselines", yellow=True)
        for file in self._written:
            reporter.line(f"written: {file}")
        for line in self._left_behind:
            reporter.line(line, yellow=True)
        show_problems(reporter, self.problems)

    def _count(self) -> str:
        return f"{self.compared} did no more than their baselines say"
