"""Runs a history on a cache and its oracle side by side, and has each step judged.

The loop knows no capability by name: it takes a snapshot, executes a step, takes another, and
hands both to the invariants and the observers of what the cache offers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.capability import Inquiry, due
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    AFTER_STEP,
    Finding,
    Invariant,
    Observation,
    Outcome,
)
from pytest_roseinfer.run.cache_run import CacheRun
from pytest_roseinfer.run.execution import Execution, left_by_bad_calls, raised_by, words_of_others

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History


class Machine(CacheRun):
    """Does the steps of a history, one after the other, and then bad calls."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        super().__init__(adapter_type, history)
        offers = adapter_type.capabilities
        self.invariants: list[Invariant] = sorted(
            (each for one in offers for each in one.invariants), key=lambda each: each.rank
        )
        self.inquiries = due((each for one in offers for each in one.inquiries), self.can) * attends
        self.checked = Counter({each.name: 0 for each in self.invariants})
        """How often each invariant was checked."""
        self.step_number = 0
        """The number of the present step among those of the history, from 1 on."""

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and each condition was met."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Do one step after the other, then all bad calls; yield what was counted in each step."""
        for operation in self._possible_operations():
            yield self._step(operation)
        yield from map(self._step, self.driven.device.last_steps())
        if found := left_by_bad_calls(self, self._anew):
            self.fail(found[0], also=words_of_others(found))

    def run_steps(self) -> None:
        """Do every step, and make no bad call."""
        for operation in self._possible_operations():
            self._step(operation)
        self.finish()

    def _anew(self, history: History) -> Machine:
        """Return a run of another history on a cache of its own."""
        return Machine(self.declared, history, attends=False)

    def history_so_far(self) -> History:
        """Return the history up to the present step."""
        return replace(self.history, operations=self.history.operations[: self.step_number])

    def _possible_operations(self) -> Iterator[Operation]:
        """List what can be done. How much was found, and so is copied, this run alone knows."""
        operations = self.history.operations
        for number, operation in enumerate(operations, 1):
            self.step_number, self.last = number, number == len(operations)
            step = operation.fitted(self.oracle)
            if step.possible(self.oracle) or not self.oracle.finds_blocks:
                yield step

    def _step(self, step: Operation) -> Counter[str]:
        with self.watched("the step"):
            return self._try_step(step)

    def _try_step(self, step: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        for observer in self.observers.values():
            if met := observer.before(step):
                counted.update(met)
        self.done.append(step)
        outcome = Execution(self, step).do()
        if outcome.refusal:
            self.refused[len(self.done)] = outcome.refusal
        if step.looks:
            self.finish()
        before, self.now = self.now, self.look(reads=True)
        seen = self.observation(self.now, before=before, outcome=outcome, operation=step)
        counted.update(self._judge(AFTER_STEP, seen))
        for observer in self.observers.values():
            if met := observer.after(seen):
                counted.update(met)
        for inquiry in self.inquiries:
            at = self.last or len(self.done) % inquiry.every == 0
            if at and self.driven.device.idle:
                counted.update(self._inquire(inquiry))
        return +counted

    def _inquire(self, inquiry: Inquiry) -> Mapping[str, int]:
        if not (answered := inquiry.ask(self)):
            return {}
        self.finish()
        before, after = self.now, self.look(copies=False)
        outcome = Outcome(True, self.driven.options)
        # Asking changes nothing that is stored, so the copy of it serves the next step too.
        self.now = replace(before, counts=after.counts)
        seen = self.observation(after, before=before, outcome=outcome, answers=answered)
        return self._judge(inquiry.after, seen)

    def make_bad_call(self, bad: BadCall) -> Finding | None:
        """Make a bad call, and say what is wrong with what came of it."""
        with self.watched(bad.words), self.driven.device.working():
            raised = raised_by(bad)
        self.finish()
        try:
            after = self.look(copies=False)
        except WrongAnswer as wrong:
            return Finding(f"behind {bad.words}, {wrong}")
        outcome = Outcome(True, self.driven.options)
        seen = self.observation(
            after, before=self.now, outcome=outcome, bad_call=bad, raised=raised
        )
        return self._first_finding(AFTER_BAD_CALL, seen)

    def _judge(self, kind: str, seen: Observation) -> Mapping[str, int]:
        """Hand an observation to all invariants that are due; return what was counted in it."""
        if finding := self._first_finding(kind, seen):
            self.fail(finding)
        return seen.ran

    def _first_finding(self, kind: str, seen: Observation) -> Finding | None:
        for each in self.invariants:
            if kind in each.after and each.needs <= self.can:
                self.checked[each.name] += 1
                if finding := each.check(seen):
                    return finding
        return None


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
