"""What the fixture ``roseinfer_costs`` hands to a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.work.cost_file import NAME, UPDATE, as_entry, baseline, read_costs
from pytest_roseinfer.gates.work.cost_gate import CostGate
from pytest_roseinfer.gates.work.cost_verdict import judge
from pytest_roseinfer.gates.work.measure_work import Step, measure_work
from pytest_roseinfer.gates.work.own_code import OwnCode
from pytest_roseinfer.gates.work.step_work import CannotCompare, versions_here

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer.gates.work.step_work import StepWork


class Costs:
    """Holds steps of one test against the baselines of its suite."""

    def __init__(self, item: pytest.Item, marked: Mapping[str, tuple[str, ...]]) -> None:
        """``marked`` are the arguments of the test's markers."""
        self.checked: set[str] = set()
        self._gate = CostGate.of(item.config)
        self._asked = settings.current()
        self._marked = marked
        self._file = Path(self._asked.costs or item.path.parent / NAME)
        folder = os.path.relpath(item.path, self._file.parent).replace(os.sep, "/")
        self._test = f"{folder}::{item.nodeid.partition('::')[2]}"

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

        The step runs six times, each time after ``before``, which brings about what the step
        is to be about: the end of a block, say, or blocks that are shared. ``counters``
        returns what your code counts itself, numbers that only ever rise. ``name`` tells the
        steps of a test apart.
        """
        if tokens < 1:
            raise ValueError(f"a step that brings {tokens} tokens is no decode step")
        if name in self.checked:
            raise ValueError(f"{self._test} has checked a step by the name {name!r} already")
        self.checked.add(name)
        try:
            self._check(name, Step(step, tokens, before, counters))
        except CannotCompare as error:
            said = f"{name}: {error}"
        else:
            return
        pytest.fail(said, pytrace=False)  # outside, or the reason would be shown twice

    def _check(self, name: str, step: Step) -> None:
        device = self._asked.device.partition(":")[0]
        versions = versions_here(self._marked["keyed_by"])
        work = measure_work(step, OwnCode(self._marked["packages"]), device)
        where = (self._test, name, device)
        if self._asked.update_costs:
            self._gate.measured(self._file, where, as_entry(work, versions))
            return
        self._judge(name, work, baseline(read_costs(self._file), where, versions, self._file))

    def _judge(self, name: str, work: StepWork, was: StepWork) -> None:
        verdict = judge(work, was, self._marked["must_not_drop"])
        lines = "\n  ".join(verdict.in_words())
        if verdict.worse:
            more = f"{name} does more work than its baseline in {self._file}:\n  {lines}"
            self._gate.more(f"{self._test}, {more}")
            pytest.fail(f"{more}\nIf that is meant, {UPDATE} makes it the baseline.", pytrace=False)
        self._gate.compared(f"{self._test}, {name} does less:\n  {lines}" if lines else "")
