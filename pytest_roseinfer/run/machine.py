"""The loop that runs a history on a cache and its oracle, and judges each step.

The loop depends on no capability by name: it takes a snapshot, executes a step, takes another
snapshot, and passes both to the invariants and observers of the cache's capabilities.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.capability import Inquiry, select_parts
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    AFTER_STEP,
    Finding,
    Invariant,
    Observation,
    Outcome,
)
from pytest_roseinfer.capabilities.return_values import InvalidReturnValue
from pytest_roseinfer.run.cache_run import CacheRun
from pytest_roseinfer.run.execution import (
    Execution,
    describe_other_findings,
    find_bad_call_damage,
    raised_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History


class HistoryRunner(CacheRun):
    """Runner of the steps of a history, and of bad calls after them."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        super().__init__(adapter_type, history)
        offers = adapter_type.capabilities
        self.invariants: list[Invariant] = sorted(
            (each for one in offers for each in one.invariants), key=lambda each: each.rank
        )
        self.inquiries = (
            select_parts((each for one in offers for each in one.inquiries), self.features)
            * attends
        )
        self.invariant_checks = Counter({each.name: 0 for each in self.invariants})
        """Number of checks of each invariant."""
        self.step_number = 0
        """Number of the present step in the history, from 1; 0 before the first."""
        self.skipped: set[int] = set()
        """Numbers of the steps that were not possible in this run."""

    def run(self) -> Counter[str]:
        """Run all steps and bad calls; return the counts of paths and conditions."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Run the steps, yielding the counts of each, and then all bad calls."""
        for operation in self._possible_operations():
            yield self._step(operation)
        yield from map(self._step, self.cache_under_test.device.last_steps())
        if findings := find_bad_call_damage(self, self._new_runner):
            self.fail(findings[0], also=describe_other_findings(findings))

    def run_steps(self) -> None:
        """Run all steps without bad calls."""
        for operation in self._possible_operations():
            self._step(operation)
        self.finish()

    def _new_runner(self, history: History) -> HistoryRunner:
        """Return a runner of another history with a new cache."""
        return HistoryRunner(self.declared, history, attends=False)

    def history_so_far(self) -> History:
        """Return the history up to the present step."""
        return replace(self.history, operations=self.history.operations[: self.step_number])

    def _possible_operations(self) -> Iterator[Operation]:
        """Yield the possible steps, with numbers that depend on the prefixes reused in this run."""
        operations = self.history.operations
        uncertain = self.oracle.uncertain_room or "begin_with" in self.features
        for number, operation in enumerate(operations, 1):
            self.step_number, self.last = number, number == len(operations)
            step = operation.fill_in_numbers(self.oracle)
            if step.possible(self.oracle) or not uncertain:
                yield step
            else:
                self.skipped.add(number)

    def _step(self, step: Operation) -> Counter[str]:
        with self.watched("the step"):
            return self._try_step(step)

    def _try_step(self, step: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        for observer in self.observers.values():
            if met := observer.before(step):
                counted.update(met)
        self.completed_steps.append(step)
        outcome = Execution(self, step).do()
        if outcome.refusal:
            self.refused[len(self.completed_steps)] = outcome.refusal
        if step.waits_for_device:
            self.finish()
        before, self.snapshot = self.snapshot, self.take_snapshot(reads=True)
        observation = self.observation(
            self.snapshot, before=before, outcome=outcome, operation=step
        )
        counted.update(self._judge(AFTER_STEP, observation))
        for observer in self.observers.values():
            if met := observer.after(observation):
                counted.update(met)
        for inquiry in self.inquiries:
            if self._is_due(inquiry) and self.cache_under_test.device.idle:
                counted.update(self._inquire(inquiry))
        return +counted

    def _is_due(self, inquiry: Inquiry) -> bool:
        """Return True after every few steps and after the last, but not twice within those few."""
        steps_left = self.history.size - self.step_number
        regular = len(self.completed_steps) % inquiry.every == 0
        return self.last or (regular and steps_left >= inquiry.every)

    def _inquire(self, inquiry: Inquiry) -> Mapping[str, int]:
        if not (answers := inquiry.ask(self)):
            return {}
        self.finish()
        before, after = self.snapshot, self.take_snapshot(copies=False)
        outcome = Outcome(True, self.cache_under_test.options)
        # An inquiry changes no stored token, so the copied storage serves the next step too.
        self.snapshot = replace(before, counts=after.counts)
        observation = self.observation(after, before=before, outcome=outcome, answers=answers)
        return self._judge(inquiry.after, observation)

    def make_bad_call(self, bad: BadCall) -> Finding | None:
        """Make a bad call; return the finding of a failed check, or None."""
        with self.watched(bad.description), self.cache_under_test.device.torch_context():
            raised = raised_by(bad)
        self.finish()
        try:
            after = self.take_snapshot(copies=False)
        except InvalidReturnValue as wrong:
            return Finding(f"after {bad.description}, {wrong}", kind=wrong.kind)
        outcome = Outcome(True, self.cache_under_test.options)
        observation = self.observation(
            after, before=self.snapshot, outcome=outcome, bad_call=bad, raised=raised
        )
        return self._first_finding(AFTER_BAD_CALL, observation)

    def _judge(self, kind: str, observation: Observation) -> Mapping[str, int]:
        """Check all invariants that apply to an observation; return its counts."""
        if finding := self._first_finding(kind, observation):
            self.fail(finding)
        return observation.step_counts

    def _first_finding(self, kind: str, observation: Observation) -> Finding | None:
        for each in self.invariants:
            if kind in each.after and each.needs <= self.features:
                self.invariant_checks[each.name] += 1
                if finding := each.check(observation):
                    return replace(finding, kind=f"{each.name} {finding.kind}".rstrip())
        return None


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return HistoryRunner(adapter, history).run()
