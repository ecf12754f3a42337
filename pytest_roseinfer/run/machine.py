"""Runs a history on a cache and its oracle side by side, and has each step judged.

The machine drives the cache, asks it for attention, makes its bad calls, and poisons the blocks
it gives back. It makes an observation of each step, which invariants judge.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from time import process_time
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.capabilities.books import BOOK_METHODS, books_of
from pytest_roseinfer.capabilities.capability import AnyObserver, Inquiry, Look
from pytest_roseinfer.capabilities.observation import (
    AFTER_BAD_CALL,
    AFTER_STEP,
    Declared,
    Finding,
    Observation,
    Outcome,
    Snapshot,
    in_words,
)
from pytest_roseinfer.capabilities.operation import Driven, asked
from pytest_roseinfer.capabilities.payload import Payload, same_bits
from pytest_roseinfer.capabilities.writes import BatchKinds
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.misuse import left_by_bad_calls, raised_by, words_of_others
from pytest_roseinfer.run.simulated_device import QueuedDevice
from pytest_roseinfer.run.watchdog import WATCHED, StepHung

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import BadCall
    from pytest_roseinfer.capabilities.observation import Pair
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.oracle.pages import Written
    from pytest_roseinfer.oracle.texts import Said

Reads = dict[tuple[str, int, int], "Pair | Exception"]


class Machine:
    """One cache under test, its oracle, and what was done to them so far."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        self.history = history
        self.spec = spec = history.spec
        tolerance = adapter_type.tolerance.get(spec.dtype)
        values = {each.name: getattr(adapter_type, each.name) for each in fields(Declared)}
        more = {name for name, has in (("tolerance", tolerance), ("windows", spec.windows)) if has}
        more |= {f"{name}={value}" for name, value in values.items() if isinstance(value, str)}
        self.can = adapter_type.abilities.union(more, adapter_type.conditions)
        if lacking := {need for step in history.operations for need in step.needs} - self.can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        every = (each.invariants for each in adapter_type.capabilities)
        self.invariants = sorted(chain.from_iterable(every), key=lambda each: each.rank)
        every_inquiry = chain.from_iterable(each.inquiries for each in adapter_type.capabilities)
        self.inquiries = [
            each for each in every_inquiry if attends and self.can.intersection(each.any_of)
        ]
        self.oracle = Oracle.of(adapter_type, spec, history.texts)
        self.payload = Payload(spec, history.finite, tolerance)
        self.last = not history.operations
        """Whether no step comes after this one."""
        self.step_number = 0
        """The number of the present step among those of the history, from 1 on."""
        self.done: list[Operation] = []
        self.refused: dict[int, str] = {}
        """Why the cache had to refuse steps, by their numbers."""
        self.adapter = adapter_type()
        coverage.current().count_calls(self.adapter)
        with self._watched("make()"):
            self.adapter.make(spec)
        self.driven = Driven(self.adapter, spec.options)
        self.declared = Declared(
            **{each.name: getattr(self.adapter, each.name) for each in fields(Declared)}
        )
        self.shares_prefixes = self.adapter.sharing == "equal prefixes"
        self.checked = Counter({each.name: 0 for each in self.invariants})
        """How often each invariant was checked."""
        self.device = self.driven.device
        if "use_queue" in self.can:
            self.device = self.driven.device = QueuedDevice(self.adapter)
        self.seen: dict[int, int] = {}
        """Every token that was ever to be written, and the sequence that was the first to do it."""
        with self._watched("a first look"):
            views = chain.from_iterable(each.views for each in adapter_type.capabilities)
            self.views = [each for each in views if self.can.intersection(each.any_of)]
            kinds = chain.from_iterable(each.observers for each in adapter_type.capabilities)
            self.observers = {
                kind: kind(self)
                for kind in kinds
                if not kind.any_of or self.can.intersection(kind.any_of)
            }
            self.now = self.look()
            """The cache after the latest step."""

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and each condition was met."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Do one step after the other, then all bad calls; yield what was counted in each step."""
        for operation in self._possible_operations():
            yield self._step(operation)
        yield from map(self._step, self.device.last_steps())
        if found := left_by_bad_calls(self, partial(Machine, type(self.adapter), attends=False)):
            self.fail(found[0], also=words_of_others(found))

    @property
    def batches(self) -> Mapping[str, int]:
        """How often each kind of batch was stored."""
        observer = self.observer(BatchKinds)
        return observer.counts if observer else {}

    def history_so_far(self) -> History:
        """Return the history up to the present step."""
        return replace(self.history, operations=self.history.operations[: self.step_number])

    def _possible_operations(self) -> Iterator[Operation]:
        """List what can be done. How much was found, and so is copied, this run alone knows."""
        finds = "begin_with" in self.can
        operations = self.history.operations
        for number, operation in enumerate(operations, 1):
            self.step_number, self.last = number, number == len(operations)
            step = operation.fitted(self.oracle) if finds else operation
            if step.possible(self.oracle) or not self.shares_prefixes:
                yield step

    def _step(self, operation: Operation) -> Counter[str]:
        with self._watched("the step"):
            return self._try_step(operation)

    def _try_step(self, operation: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        for observer in self.observers.values():
            counted.update(observer.before(operation))
        self.done.append(operation)
        outcome = self._do(operation)
        early = self._read_and_finish() if operation.looks else {}
        before, self.now = self.now, self.look(reads=True, early=early)
        seen = self.observation(self.now, before=before, outcome=outcome, operation=operation)
        counted.update(self._judge(AFTER_STEP, seen))
        for observer in self.observers.values():
            counted.update(observer.after(seen))
        for inquiry in self.inquiries:
            if (self.last or len(self.done) % inquiry.every == 0) and self.device.idle:
                counted.update(self._inquire(inquiry))
        return +counted

    def _do(self, operation: Operation) -> Outcome:
        """Do a step to the oracle and to the cache, which must refuse it where it does not fit."""
        oracle, driven, rows = self.oracle, self.driven, operation.rows()
        said = operation.said(oracle)
        name, room = ("write", f" ({oracle.room(rows)})") if rows else ("step", "")
        listed, why, refused = self._refusal(operation, room)
        errors: tuple[type[BaseException], ...] = getattr(self.adapter, listed)
        admitted, written = operation.admitted(oracle), operation.written(oracle)
        fits, stored = admitted is operation, None
        # It may find blocks that hold the same already.
        may_fit = self.shares_prefixes and operation.may_find_blocks() and not admitted
        if admitted:
            stored = written if fits else admitted.written(oracle)
            admitted.change(oracle)
        if written:
            self._make_inputs(operation, written)
        try:
            answer = self._drive(operation, said)
        except errors as error:
            if fits:
                what = f"refused a {name} that fits{room}: {in_words(error)}"
                what += "".join(each.about_refusals() for each in self.observers.values())
                self.fail(Finding(what, cause=error))
            operation.refuse(oracle, admitted)
            behind = f" behind its first {len(admitted.rows())} rows" if admitted else ""
            self.refused[len(self.done)] = f"refused{behind}: {refused}"
        except WrongAnswer:
            raise
        except Exception as error:
            due = f"one of {listed} ({' or '.join(each.__name__ for each in errors)})"
            also = f"{room}; if it fits only where blocks are found, raise {due}"
            then = room if fits else also if may_fit else f", where {due} is due: {refused}"
            what = f"the {name} raised {in_words(error)}{then}"
            self.fail(Finding(what, cause=error, without_room=not fits))
        else:
            if not fits and not may_fit:
                self.fail(Finding(f"accepted a {name} that {why}"))
            if not fits:
                operation.change(oracle)
                fits, stored = True, written
            if wrong := operation.settle(oracle, answer):
                self.fail(Finding(wrong))
        if written:
            if self.device.idle and (changed := self._changed_inputs()):
                self.fail(Finding(f"the write changed the {changed} that it was handed"))
            # A cache that keeps what it was handed reads poison from here on.
            self.device.overwrite(driven.key)
            self.device.overwrite(driven.value)
        return Outcome(fits, driven.planned_with, stored)

    def _refusal(self, operation: Operation, room: str) -> tuple[str, str, str]:
        """Name the errors that refuse a step where that is due, and say why it is, in two ways."""
        if operation.allowed(self.oracle):
            return "full_errors", f"does not fit{room}", f"no room{room}"
        return "untrimmable_errors", "it must refuse", "it cannot be trimmed"

    def _make_inputs(self, operation: Operation, written: Written) -> None:
        """Make the tensors that a step is to write, and note who writes each token."""
        writers = (seq for seq, count in written.rows for _ in range(count))
        for seq, token in zip(writers, written.tokens, strict=True):
            self.seen.setdefault(token, seq)
        tokens, driven = operation.inputs(written.tokens), self.driven
        driven.key, driven.value = self.payload.inputs(tokens, written.layout)
        self.handed = driven.key.clone(), driven.value.clone()
        self.device.hand_over(driven.key, driven.value)

    def _changed_inputs(self) -> str:
        """Say which tensors are no more what they were when the cache was handed them."""
        given = ("keys", self.driven.key), ("values", self.driven.value)
        both = zip(given, self.handed, strict=True)
        return " and ".join(name for (name, now), was in both if not same_bits(now, was))

    def _drive(self, operation: Operation, said: list[Said]) -> object:
        """Have the cache do a step, told first what the tokens say; return what it answers."""
        driven = self.driven
        driven.planned_with = driven.options
        with self.device.working():
            for observer in self.observers.values():
                observer.driving(operation, said)
            driven.said = said
            return operation.drive(driven)

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

    def run_steps(self) -> None:
        """Do every step, and make no bad call."""
        for operation in self._possible_operations():
            self._step(operation)
        self._finish()

    def make_bad_call(self, bad: BadCall) -> Finding | None:
        """Make a bad call, and say what is wrong with what came of it."""
        with self._watched(bad.words), self.device.working():
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

    def look(
        self, *, reads: bool = False, copies: bool = True, early: Reads | None = None
    ) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live arena.

        While the device has something to do, what is stored is left out. ``early`` was read then.
        """
        there = self.device.idle
        read = {**(early or {}), **(self._reads(("peek", "gather")) if reads and there else {})}
        look = Look(lookups=reads, copies=copies)
        shown = {name: part for view in self.views for name, part in view.show(self, look).items()}
        return replace(self.books(self.adapter), reads=read, **shown)

    def _reads(self, routes: Iterable[str], when: str = "") -> Reads:
        return {
            (route + when, seq, layer): asked(_read, self.adapter, route, seq, layer)
            for seq in self.oracle.readable
            for layer in range(self.spec.num_layers)
            for route in routes
            if route == "peek" or (route in self.can and (when or self._gathers(seq)))
        }

    def _gathers(self, seq: int) -> bool:
        return self.last or (len(self.done) + seq) % self.history.gathers_every == 0

    def _read_and_finish(self) -> Reads:
        """Have the device finish; return what the cache read before that and had to wait for."""
        routes = ["gather"] if self.adapter.gather_in_flight else []
        with self.device.working():
            read = self._reads(routes, " with calls in flight")
        self._finish()
        return read

    def _finish(self) -> None:
        try:
            self.device.finish()
        except Exception as error:
            what = f"a call that the device made late raised {type(error).__name__}: {error}"
            self.fail(Finding(what, cause=error))

    def books(self, adapter: KVCacheAdapter) -> Snapshot:
        if not BOOK_METHODS & adapter.abilities:
            return Snapshot()
        with self.device.working():
            return books_of(adapter, self.oracle, self.spec.num_layers)

    def _judge(self, kind: str, seen: Observation) -> Mapping[str, int]:
        """Hand an observation to all invariants that are due; return what was counted in it."""
        if finding := self._first_finding(kind, seen):
            self.fail(finding)
        return seen.ran

    def observer(self, kind: type[AnyObserver]) -> AnyObserver | None:
        found = self.observers.get(kind)
        return found if isinstance(found, kind) else None

    def _first_finding(self, kind: str, seen: Observation) -> Finding | None:
        for each in self.invariants:
            if kind in each.after and each.needs <= self.can:
                self.checked[each.name] += 1
                if finding := each.check(seen):
                    return finding
        return None

    def observation(self, after: Snapshot, **what: Any) -> Observation:
        notes = {kind: each.notes(after) for kind, each in self.observers.items()}
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            seen=self.seen,
            declared=self.declared,
            notes=notes,
            **what,
        )

    def fail(self, finding: Finding, also: str = "") -> NoReturn:
        try:
            books = self.books(self.adapter)
        except WrongAnswer:  # what was found before is told
            books = Snapshot()
        divergence = self._divergence(finding, books)
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


def _read(adapter: KVCacheAdapter, route: str, seq: int, layer: int) -> Pair:
    """Copy what a sequence reads back: the next read may use the same memory."""
    shown = getattr(adapter, route)(seq, layer)
    like = torch.contiguous_format
    try:
        keys, values = shown
        return keys.clone(memory_format=like), values.clone(memory_format=like)
    except Exception:
        answers.pair(f"{route}({seq}, {layer})", shown)
        raise


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
