"""What the fixture ``roseinfer_costs`` hands to a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.cost_file import NAME, UPDATE, as_entry, read_baseline
from pytest_roseinfer.gates.work.cost_gate import CostGate
from pytest_roseinfer.gates.work.measure_work import Step, measure_work
from pytest_roseinfer.gates.work.python_calls import OwnCode
from pytest_roseinfer.gates.work.step_work import judge, versions_here

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.gates.work.cost_file import Where
    from pytest_roseinfer.gates.work.step_work import CostVerdict, StepWork


class Costs:
    """Compares steps of one test with their baselines."""

    def __init__(self, item: pytest.Item, marked: Mapping[str, Sequence[str]]) -> None:
        """``marked`` holds the arguments of the test's markers."""
        self.checked: set[str] = set()
        self._config = item.config
        self._gate = CostGate.of(item.config)
        self._asked = settings.current()
        self._marked = marked
        self._file = Path(self._asked.costs or item.path.parent / NAME)
        test_file = os.path.relpath(item.path, self._file.parent).replace(os.sep, "/")
        self._test = f"{test_file}::{item.nodeid.partition('::')[2]}"

    def check(
        self,
        name: str,
        step: Callable[[], object],
        *,
        tokens: int,
        before: Callable[[], object] | None = None,
        counters: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """Fail if ``step``, which brings ``tokens`` tokens, does more than its baseline.

        The step runs six times. ``before`` runs ahead of each and sets up what the step is
        about: the end of a block, say, or shared blocks. ``counters`` returns what your code
        counts itself, numbers that only ever rise. ``name`` tells the steps of a test apart.
        """
        if tokens < 1:
            raise ValueError(f"a step that brings {tokens} tokens is no decode step")
        if name in self.checked:
            raise ValueError(f"{self._test} has checked a step by the name {name!r} already")
        self.checked.add(name)
        try:
            self._check(name, Step(step, tokens, before, counters))
        except CannotCompare as error:
            raise pytest.fail.Exception(f"{name}: {error}", pytrace=False) from None

    def _check(self, name: str, step: Step) -> None:
        device = self._asked.device.partition(":")[0]
        where = (self._test, name, device)
        versions = versions_here(self._marked.get("keyed_by", ()))
        work = measure_work(step, OwnCode(self._marked.get("packages", ())), device)
        if self._asked.update_costs:
            self._gate.measured.append((str(self._file), where, as_entry(work, versions)))
            self._keep(where, work, None)
            return
        was = read_baseline(self._file, where, versions)
        verdict = judge(work, was, self._marked.get("must_not_drop", ()))
        self._keep(where, work, verdict)
        lines = "\n  ".join(verdict.worse + verdict.less)
        if verdict.worse:
            more = f"{name} does more work than its baseline in {self._file}:\n  {lines}"
            self._gate.more.append(f"{self._test}, {more}")
            pytest.fail(f"{more}\nIf that is meant, {UPDATE} makes it the baseline.", pytrace=False)
        self._gate.compared += 1
        if lines:
            self._gate.less.append(f"{self._test}, {name} does less:\n  {lines}")

    def _keep(self, where: Where, work: StepWork, verdict: CostVerdict | None) -> None:
        if self._asked.timing.folder:
            from pytest_roseinfer.gates.history.history_gate import HistoryGate

            HistoryGate.of(self._config).keep_work(where, work, verdict)
