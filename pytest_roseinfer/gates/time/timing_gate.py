"""The gate of time holds the two sides of a run, and collects what its tests found about them."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.gates.gate import Gate, show_problems
from pytest_roseinfer.gates.time import timing_report
from pytest_roseinfer.gates.time.sides import other_side, require_known, this_side

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pytest

    from pytest_roseinfer.gates.time.timing_report import Timed
    from pytest_roseinfer.gates.time.worker_process import Side

NEXT_TO_OTHERS = (
    "decode steps are not timed by workers of pytest-xdist, which would time each other: run "
    "them without -n"
)


class TimingGate(Gate):
    """Tests add their comparisons to ``results``."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._built = ExitStack()
        config.add_cleanup(self._built.close)
        self.results: list[Timed] = []
        self._lines: list[str] = []
        self._held_to_baseline = False
        self._found_new = False

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """There and here; both are here if there is nothing to compare with."""
        here = this_side(self._folder, [str(self.config.invocation_params.dir), *sys.path])
        reference = settings.current().timing.against
        if not reference:
            return here, here
        return self._built.enter_context(other_side(reference, here, self._folder)), here

    def require_other_side(self) -> None:
        """Raise ``Mistake`` where there is nothing of the name to compare with."""
        if reference := settings.current().timing.against:
            require_known(reference, self._folder)

    @property
    def _folder(self) -> Path:
        """The project. Without an ini file, pytest takes that of the other side into account."""
        has_ini_file = self.config.inipath is not None
        return self.config.rootpath if has_ini_file else self.config.invocation_params.dir

    def held_to_baseline(self, line: str) -> None:
        """Note that a step's time was compared with this GPU's baseline, or became it."""
        self._held_to_baseline = True
        self._lines.append(line)

    def new_step(self, line: str) -> None:
        """Note a step that the other side does not have."""
        self._found_new = True
        self._lines.append(line)

    def judge(self, *, passed: bool) -> Sequence[str]:
        self._lines += filter(None, (timed.in_words() for timed in self.results))
        problem = self._nothing_done() if passed else ""
        return [problem] if problem else []

    def _nothing_done(self) -> str:
        """Return why a run that asked for this gate did not apply it, if so."""
        asked = settings.current().timing
        problem = ""
        if asked.paired and not (self.results or self._found_new):
            option = "--roseinfer-against" if asked.against else "--roseinfer-noise-floor"
            problem = f"{option}: no test of this run compared a step"
        elif asked.tpot and not self._held_to_baseline:
            problem = "--roseinfer-tpot: no test of this run compared a step with its baseline"
        if problem and self.config.getoption("numprocesses", None):
            problem += f"; {NEXT_TO_OTHERS}"
        return problem

    def _table(self, form: str) -> str:
        return timing_report.table([timing_report.entry_of(each) for each in self.results], form)

    def in_markdown(self) -> Iterable[str]:
        if not (self.results or self._found_new):
            return
        yield from (f"### roseinfer: decode steps against {self.sides[0].label}", "")
        if self.results:
            yield from (self._table("github"), "")
        yield from (f"- {line}" for line in self._lines)

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if not (self.results or self._lines or self.problems):
            return
        reporter.section("roseinfer: times of decode steps")
        if self.results:
            reporter.line(f"there: {self.results[0].there}")
            reporter.line(self._table("simple"))
        for line in self._lines:
            reporter.line(line)
        show_problems(reporter, self.problems)
