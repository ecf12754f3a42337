"""What the fixture ``roseinfer_costs`` hands to a test."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates.baselines import read_steps
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.cost_file import NAME, UPDATE, as_entry, name_of, read_baseline
from pytest_roseinfer.gates.work.cost_gate import CostGate
from pytest_roseinfer.gates.work.given_calls import require_calls
from pytest_roseinfer.gates.work.measure_work import Step, measure_work
from pytest_roseinfer.gates.work.moved.measure_bytes import measure_bytes
from pytest_roseinfer.gates.work.moved.step_memory import StepMemory
from pytest_roseinfer.gates.work.python_calls import OwnCode
from pytest_roseinfer.gates.work.step_work import judge, require_counters, versions_here
from pytest_roseinfer.running.interpreter.remembering import remembering

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from pytest_roseinfer.gates.work.cost_file import Where
    from pytest_roseinfer.gates.work.moved.step_memory import Weights
    from pytest_roseinfer.gates.work.step_work import CostVerdict, StepWork


class Costs:
    """Compares steps of one test with their baselines."""

    def __init__(self, item: pytest.Item, marked: Mapping[str, Sequence[str]]) -> None:
        """``marked`` holds the arguments of the test's markers."""
        self.checked: set[str] = set()
        self._config = item.config
        self._gate = CostGate.of(item.config)
        self._asked = settings.current()
        self._device = self._asked.device.partition(":")[0]
        self._marked = marked
        self._file = Path(self._asked.costs or item.path.parent / NAME)
        self._test = name_of(self._file, item.path, item.nodeid.partition("::")[2])

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
        with self._checking(name, tokens):
            require_calls({"step": step}, {"before": before, "counters": counters})
            own = OwnCode(self._marked.get("packages", ()))
            work = measure_work(Step(step, tokens, before, counters), own, self._device)
            self._compare(name, work, self._marked.get("must_not_drop", ()))

    def check_bytes(
        self,
        name: str,
        step: Callable[[], object],
        *,
        tokens: int,
        weights: Weights,
        cache: Iterable[Tensor],
        context_bytes: Callable[[], int],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Fail if the operations and kernels of ``step`` must move more bytes than its baseline.

        The step runs three times, each time after ``before``, which brings it to the same
        contexts. ``weights`` are modules or tensors, and ``cache`` the tensors of keys and
        values, which a step writes in place: one that it replaces is no longer known as theirs.
        ``context_bytes`` is called behind a step and returns how many bytes the keys and values
        of its sequences take, the new ones included: the least is worked out from it, and a step
        that moves less fails.
        """
        with self._checking(name, tokens):
            require_calls({"step": step, "context_bytes": context_bytes}, {"before": before})
            memory = StepMemory(weights, cache, context_bytes)
            found = measure_bytes(Step(step, tokens, before), memory, self._device)
            said = "\n".join(found.in_words())
            self._gate.bytes.append(f"{self._test}, {name}: {said}")
            self._compare(name, found.work, ())

    @contextmanager
    def _checking(self, name: str, tokens: int) -> Iterator[None]:
        """Begin a check by a new name; one that can compare nothing fails the test."""
        if tokens < 1:
            raise ValueError(f"a step that brings {tokens} tokens is no decode step")
        if name in self.checked:
            raise ValueError(f"{self._test} has checked a step by the name {name!r} already")
        self.checked.add(name)
        try:
            read_steps(self._file)  # a broken file fails this test, and not the end of the run
            with remembering():
                yield
        except CannotCompare as error:
            raise pytest.fail.Exception(f"{name}: {error}", pytrace=False) from None

    def _compare(self, name: str, work: StepWork, must_not_drop: Sequence[str]) -> None:
        where = (self._test, name, self._device)
        versions = versions_here(self._marked.get("keyed_by", ()))
        if self._asked.update_costs:
            require_counters(must_not_drop, work.groups["counters"])
            self._gate.measured.append((str(self._file), where, as_entry(work, versions)))
            self._keep(where, work, None)
            return
        was = read_baseline(self._file, where, versions)
        verdict = judge(work, was, must_not_drop)
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
