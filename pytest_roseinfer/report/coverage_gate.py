"""The gate of coverage: a run is no pass if declared paths or named targets were not checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.finding import load_target
from pytest_roseinfer.gates.gate import Gate
from pytest_roseinfer.report import files, terminal
from pytest_roseinfer.report.verdict import verdict
from pytest_roseinfer.running import coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest


class CoverageGate(Gate):
    """Judges what this process saw and its workers handed over."""

    judged_last = True

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._asked = settings.current()
        self._seen = coverage.current()
        self._by_target: dict[str, list[str]] = {}

    def to_json(self) -> dict[str, Any]:
        return self._seen.to_json()

    def add(self, seen: dict[str, Any]) -> None:
        self._seen.add(seen)

    def judge(self, *, passed: bool) -> Sequence[str]:
        """Write every report; the problems of a target are kept under its name."""
        seen, asked = self._seen, self._asked
        if not (seen.targets or asked.named_targets or asked.reports):
            return ()
        problems = self._by_target = seen.problems(require_paths=asked.require_paths)
        # A run that failed or was stopped may not have come to them.
        if passed and (unchecked := self._unchecked()):
            problems[""] = unchecked
        found = verdict(seen, asked, problems, passed=passed and not problems)
        here = self.config.invocation_params.dir
        failures = [files.write(Path(here, name), found) for name in asked.reports]
        if unwritten := [failure for failure in failures if failure]:
            problems.setdefault("", []).extend(unwritten)
        files.add_junit_properties(self.config, seen)
        return [line for lines in problems.values() for line in lines]

    def _unchecked(self) -> list[str]:
        """Targets the command line names that no test of this run touched."""
        return [
            f"--roseinfer-target {name}: no test of this run checked it. Those that do are run by "
            "pytest --pyargs pytest_roseinfer.suite"
            for name in self._asked.named_targets
            if coverage.name_of(load_target(name)) not in self._seen.targets
        ]

    def in_markdown(self) -> Iterable[str]:
        return files.in_markdown(self._seen, self._asked, self._by_target)

    def show(self, reporter: pytest.TerminalReporter) -> None:
        terminal.show(reporter, self._seen, self._asked, self._by_target)
