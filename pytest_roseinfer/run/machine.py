"""Runs a history on a cache and its oracle side by side, and has each step judged.

The loop knows no capability by name. What a cache offers decides the views of its snapshots,
the invariants that judge each step, and the observers that count what it met.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import process_time
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.capability import AnyObserver, Inquiry, Look, due, offered
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    AFTER_STEP,
    Finding,
    Observation,
    Outcome,
    Snapshot,
)
from pytest_roseinfer.capabilities.operation import Driven
from pytest_roseinfer.capabilities.payload import Payload
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.execution import Execution
from pytest_roseinfer.run.misuse import left_by_bad_calls, raised_by, words_of_others
from pytest_roseinfer.run.watchdog import WATCHED, StepHung

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall
    from pytest_roseinfer.capabilities.capability import View
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History


class Machine:
    """One cache under test, its oracle, and what was done to them so far."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        self.history = history
        self.gathers_every = history.gathers_every
        self.spec = spec = history.spec
        self.can = can = offered(adapter_type, spec)
        if lacking := {need for step in history.operations for need in step.needs} - can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        offers = adapter_type.capabilities
        self.invariants = sorted(
            (each for one in offers for each in one.invariants), key=lambda each: each.rank
        )
        self.inquiries = due((each for one in offers for each in one.inquiries), can) * attends
        self.views = due((each for one in offers for each in one.views), can)
        self.oracle = Oracle.of(adapter_type, spec, history.texts)
        self.payload = Payload.of(adapter_type, spec, finite=history.finite)
        self.last = not history.operations
        """Whether no step comes after this one."""
        self.step_number = 0
        """The number of the present step among those of the history, from 1 on."""
        self.done: list[Operation] = []
        self.refused: dict[int, str] = {}
        """Why the cache had to refuse steps, by their numbers."""
        self.seen: dict[int, int] = {}
        """Every token that was ever to be written, and the sequence that was the first to do it."""
        self.checked = Counter({each.name: 0 for each in self.invariants})
        """How often each invariant was checked."""
        self.declared, self.adapter = adapter_type, adapter_type()
        coverage.current().count_calls(self.adapter)
        with self._watched("make()"):
            self.adapter.make(spec)
        self.driven = Driven(self.adapter, spec.options)
        with self._watched("a first look"):
            for setup in due((each for one in offers for each in one.setups), can):
                setup.prepare(self)
            kinds = due((each for one in offers for each in one.observers), can)
            self.observers = {kind: kind(self) for kind in kinds}
            self.now = self.look()
            """The cache after the latest step."""

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and each condition was met."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Do one step after the other, then all bad calls; yield what was counted in each step."""
        for operation in self._possible_operations():
            yield self._step(operation)
        yield from map(self._step, self.driven.device.last_steps())
        if found := left_by_bad_calls(self, partial(Machine, type(self.adapter), attends=False)):
            self.fail(found[0], also=words_of_others(found))

    def run_steps(self) -> None:
        """Do every step, and make no bad call."""
        for operation in self._possible_operations():
            self._step(operation)
        self._finish()

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
        with self._watched("the step"):
            return self._try_step(step)

    def _try_step(self, step: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        for observer in self.observers.values():
            counted.update(observer.before(step))
        self.done.append(step)
        outcome = Execution(self, step).do()
        if outcome.refusal:
            self.refused[len(self.done)] = outcome.refusal
        if step.looks:
            self._finish()
        before, self.now = self.now, self.look(reads=True)
        seen = self.observation(self.now, before=before, outcome=outcome, operation=step)
        counted.update(self._judge(AFTER_STEP, seen))
        for observer in self.observers.values():
            counted.update(observer.after(seen))
        for inquiry in self.inquiries:
            at = self.last or len(self.done) % inquiry.every == 0
            if at and self.driven.device.idle:
                counted.update(self._inquire(inquiry))
        return +counted

    def _inquire(self, inquiry: Inquiry) -> Mapping[str, int]:
        if not (answered := inquiry.ask(self)):
            return {}
        self._finish()
        before, after = self.now, self.look(copies=False)
        outcome = Outcome(True, self.driven.options)
        # Asking changes nothing that is stored, so the copy of it serves the next step too.
        self.now = replace(before, counts=after.counts)
        seen = self.observation(after, before=before, outcome=outcome, answers=answered)
        return self._judge(inquiry.after, seen)

    def make_bad_call(self, bad: BadCall) -> Finding | None:
        """Make a bad call, and say what is wrong with what came of it."""
        with self._watched(bad.words), self.driven.device.working():
            raised = raised_by(bad)
        self._finish()
        try:
            after = self.look(copies=False)
        except WrongAnswer as wrong:
            return Finding(f"behind {bad.words}, {wrong}")
        outcome = Outcome(True, self.driven.options)
        seen = self.observation(
            after, before=self.now, outcome=outcome, bad_call=bad, raised=raised
        )
        return self._first_finding(AFTER_BAD_CALL, seen)

    def look(self, *, reads: bool = False, copies: bool = True) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live storage."""
        return self._snapshot(self.views, Look(reads=reads, copies=copies))

    def _snapshot(self, views: Sequence[View], look: Look) -> Snapshot:
        """Take the parts that views show; several may add to one of them."""
        shown: dict[str, Any] = {}
        for view in views:
            for name, part in view.show(self, look).items():
                shown[name] = shown[name] | part if name in shown else part
        return Snapshot(**shown)

    def _finish(self) -> None:
        try:
            self.driven.device.finish()
        except Exception as error:
            what = f"a call that the device made late raised {type(error).__name__}: {error}"
            self.fail(Finding(what, cause=error))

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

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        found = self.observers.get(kind)
        return found if isinstance(found, kind) else None

    def observation(self, after: Snapshot, **what: Any) -> Observation:
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            seen=self.seen,
            declared=self.declared,
            scratch_blocks=self.adapter.scratch_blocks,
            notes={kind: each.notes(after) for kind, each in self.observers.items()},
            **what,
        )

    def fail(self, finding: Finding, also: str = "") -> NoReturn:
        pictured = [view for view in self.views if view.in_pictures]
        try:
            shown = self._snapshot(pictured, Look(reads=False, copies=False))
        except WrongAnswer:  # what was found before is told
            shown = Snapshot()
        divergence = self._divergence(finding, shown)
        if also:
            divergence.added.append(also)
        raise divergence from finding.cause

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Fail where it does not come back, or answers with what is no answer.

        The cache is not asked for its books as well.
        """
        WATCHED.began = process_time()
        try:
            yield
        except StepHung as hung:
            raise self._divergence(Finding(f"{what} {hung}"), Snapshot()) from hung
        except WrongAnswer as wrong:
            raise self._divergence(Finding(str(wrong)), Snapshot()) from wrong.__cause__

    def _divergence(self, finding: Finding, shown: Snapshot) -> Divergence:
        so_far = replace(self.history, operations=tuple(self.done))
        return Divergence(finding, so_far, self.oracle, shown, self.refused)


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
