"""Runs a history on a cache and its oracle side by side, and has each step judged.

The machine drives the cache, asks it for attention, makes its bad calls, and poisons the blocks
it gives back. It makes an observation of each step, which invariants judge.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pytest_roseinfer import invariants
from pytest_roseinfer.adapters.reuse_conditions import USED_AGAIN
from pytest_roseinfer.adapters.standard_bad_calls import Situation, standard_bad_calls
from pytest_roseinfer.cases.operations.device.read import Read
from pytest_roseinfer.cases.operations.operation import Driven
from pytest_roseinfer.cases.payload import Payload, lay_out
from pytest_roseinfer.cases.weak_hash import Collisions
from pytest_roseinfer.discover import import_all
from pytest_roseinfer.findings.contents import Contents, contents_of
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.findings.observation import (
    Attended,
    Declared,
    Observation,
    Outcome,
    Snapshot,
)
from pytest_roseinfer.findings.released import Released, released_of
from pytest_roseinfer.invariants.counts import conditions_met
from pytest_roseinfer.invariants.invariant import ATTENTION, BAD_CALL, INVARIANTS, OPERATION
from pytest_roseinfer.invariants.own_conditions import OWN_CONDITIONS, own_conditions_met
from pytest_roseinfer.invariants.stored.attention import EVERY, questions
from pytest_roseinfer.running.busy import busy_history
from pytest_roseinfer.running.queued_device import QueuedDevice
from pytest_roseinfer.running.shown_storage import STORED, Storage
from pytest_roseinfer.running.used_again import UsedAgain
from pytest_roseinfer.running.watchdog import WATCHED, StepHung
from pytest_roseinfer.windowed_oracle import ORACLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import BadCall, KVCacheAdapter, Ledger
    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.findings.observation import Pair
    from pytest_roseinfer.texts import Said

Reads = dict[tuple[str, int, int], "Pair | Exception"]
_T = TypeVar("_T")
_POISON = float("nan")

import_all(invariants)


class Machine:
    """One cache under test, its oracle, and what was done to them so far."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        self.history = history
        self.spec = spec = history.spec
        tolerance = adapter_type.tolerance.get(spec.dtype)
        more = {name for name, has in (("tolerance", tolerance), ("windows", spec.windows)) if has}
        self.can = adapter_type.abilities | more
        if lacking := {need for step in history.operations for need in step.needs} - self.can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        self.attends = attends and "attend" in self.can
        self.oracle = ORACLES[bool(spec.windows)].of(adapter_type, spec, history.texts)
        self.payload = Payload(spec, history.finite, tolerance)
        self.done: list[Operation] = []
        self.adapter = adapter_type()
        try:
            self.adapter.make(spec)
        except StepHung as hung:
            self._fail_hung("make()", hung)
        self.driven = Driven(self.adapter, spec.options)
        self.declared = Declared(
            self.adapter.paths,
            self.adapter.conditions,
            self.adapter.row_conditions,
            self.adapter.fork_shares,
            self.adapter.sharing,
            self.adapter.match_granularity,
            self.adapter.match_leaves,
            # Of two blocks whose hashes are equal a cache may keep one.
            "some" if "use_hash" in self.can else self.adapter.match_finds,
            self.adapter.evicts,
            self.adapter.scratch_blocks,
        )
        self.shares_prefixes = self.adapter.sharing == "equal prefixes"
        self.own_conditions = [name for name in OWN_CONDITIONS if name in self.adapter.conditions]
        self.shown_again = [name for name in USED_AGAIN if name in self.adapter.conditions]
        self.used_again = UsedAgain() if self.shown_again else None
        self.checked = Counter({each.name: 0 for each in INVARIANTS})
        """How often each invariant was checked."""
        self.contents: Contents = {}
        """What blocks held after the latest step."""
        self.released: Mapping[int, Released] = {}
        """What was kept for later texts then."""
        self.collisions = Collisions() if "use_hash" in self.can else None
        if self.collisions:
            self.adapter.use_hash(self.collisions.hashed)
        self.device = self.driven.device
        if "use_queue" in self.can:
            self.device = self.driven.device = QueuedDevice(self.adapter)
        self.seen: set[int] = set()
        """Every token that was ever to be written."""
        self.storage = Storage(self.adapter) if self.can.intersection(STORED) else None
        self.now = self.look()
        """The cache after the latest step."""

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and each condition was met."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Do one step after the other; yield what was counted in each."""
        for operation in self._possible_operations():
            yield self._step(operation)
        if not self.device.idle:
            yield self._step(Read())
        self._make_bad_calls()

    def _possible_operations(self) -> Iterator[Operation]:
        for operation in self.history.operations:
            if operation.possible(self.oracle) or not self.shares_prefixes:
                yield operation

    def _step(self, operation: Operation) -> Counter[str]:
        WATCHED.began = monotonic()
        try:
            return self._try_step(operation)
        except StepHung as hung:
            self._fail_hung("the step", hung)

    def _try_step(self, operation: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        if self.own_conditions:
            met = own_conditions_met(self.oracle, operation)
            counted.update({name: met[name] for name in self.own_conditions if met[name]})
        if not self.device.idle:
            counted["calls_in_flight"] += 1
        self.done.append(operation)
        outcome = self._do(operation)
        early = self._read_and_finish() if operation.looks else {}
        before, self.now = self.now, self.look(reads=True, early=early)
        counted.update(self._judge(OPERATION, before, outcome, self.now, operation=operation))
        if self.collisions and self.collisions.seen:
            counted["hash_collision"] += self.collisions.take()
        if left := self.oracle.take_left():
            counted["left_a_window"] += left
        if self.declared.evicts != "any":
            kept = before.tables_of(0), self.now.ledger(0).cached
            self.released = released_of(self.released, *kept, self.contents, len(self.done))
        if "matched" in self.can or self.declared.evicts != "any":
            self.contents = self._contents(self.now)
        if self.shares_prefixes:
            self.oracle.adopt_sharing(self.now.tables_of(0))
        if self.used_again:
            met = self.used_again.met(self.driven, self.now, self.oracle.away.stages)
            counted.update({name: met[name] for name in self.shown_again if met[name]})
        self._poison_what_was_freed(before)
        done = len(self.done)
        due = done % EVERY == 0 or done >= self.history.size
        if self.attends and due and self.device.idle:
            counted.update(self._ask_for_attention())
        return counted

    # ----------------------------------------------------------------------------- acting

    def _do(self, operation: Operation) -> Outcome:
        """Do a step to the oracle and to the cache, which must refuse it where it does not fit."""
        oracle, driven, rows = self.oracle, self.driven, operation.rows()
        said = operation.said(oracle)
        name, room = "step", ""
        if rows:
            name, room = "write", f" ({oracle.room(rows)})"
        errors, why = self.adapter.full_errors, f"does not fit{room}"
        if not operation.allowed(oracle):
            errors, why = self.adapter.untrimmable_errors, "it must refuse"
        admitted, written = operation.admitted(oracle), operation.written(oracle)
        fits, stored, met = admitted is operation, None, Counter[str]()
        # It may find blocks that hold the same already.
        may_fit = self.shares_prefixes and operation.may_find_blocks() and not admitted
        if admitted:
            stored = written if fits else admitted.written(oracle)
            if self.declared.row_conditions:
                met = conditions_met(oracle, admitted)
            admitted.change(oracle)
        if written:
            self.seen.update(written.tokens)
            tokens = operation.inputs(written.tokens)
            driven.key, driven.value = self.payload.inputs(tokens, written.layout)
            self.device.hand_over(driven.key, driven.value)
        driven.planned_with = driven.options
        try:
            with self.device.working():
                self._tell_namespaces(said)
                if rows and said and "texts" in self.can:
                    self.adapter.texts([each.tokens for each in said])
                driven.said = said
                answer = operation.drive(driven)
        except errors as error:
            if fits:
                self.fail(Finding(f"refused a {name} that fits{room}: {error}", cause=error))
        except Exception as error:
            what = f"the {name} raised {type(error).__name__}: {error}"
            self.fail(Finding(what, cause=error))
        else:
            if not fits and not may_fit:
                self.fail(Finding(f"accepted a {name} that {why}"))
            if not fits:
                operation.change(oracle)
                fits, stored = True, written
            if wrong := operation.settle(oracle, answer):
                self.fail(Finding(wrong))
        if written:
            # A cache that keeps what it was handed reads poison from here on.
            self.device.overwrite(driven.key, _POISON)
            self.device.overwrite(driven.value, _POISON)
        return Outcome(fits, driven.planned_with, stored, met)

    def _tell_namespaces(self, said: Sequence[Said]) -> None:
        if said and "namespaces" in self.can:
            self.adapter.namespaces([each.namespace for each in said])

    def _poison_what_was_freed(self, before: Snapshot) -> None:
        """Overwrite what nobody will read of the blocks given back, in the cache and its copy."""
        if self.storage is None or "table" not in self.can or not self.device.idle:
            return
        if before.arena is None and before.scales is None:  # the device was at work
            return
        for layer in range(self.spec.num_layers):
            kept = {*self.now.ledger(layer).cached} if "ledger" in self.can else set[int]()
            for block in before.owners(layer).keys() - self.now.owners(layer).keys() - kept:
                self.storage.poison(layer, block, self.now)

    def _ask_for_attention(self) -> Mapping[str, int]:
        answers: list[Attended] = []
        for seqs, query, layout, layer in questions(self.payload, self.oracle, len(self.done)):
            laid_out = lay_out(query[None], layout)[0]
            self.device.hand_over(laid_out)
            with self.device.working():
                found = _asked(self.adapter.attend, list(seqs), laid_out, layer)
            answers.append(Attended(seqs, layer, query, found))
            if isinstance(found, Exception):
                break
        if not answers:
            return {}
        self._finish()
        before, after = self.now, self.look(copies=False)
        outcome = Outcome(True, self.driven.options)
        # Asking changes nothing that is stored, so the copy of it serves the next step too.
        self.now = replace(before, counts=after.counts)
        return self._judge(ATTENTION, before, outcome, after, attended=answers)

    def _make_bad_calls(self) -> None:
        """Make all bad calls, and fail with all that leave a trace."""
        if found := self._left_by_bad_calls():
            with suppress(Exception):  # it may have other faults, which are not to be told here
                busy = Machine(type(self.adapter), busy_history(self.spec, self.can), attends=False)
                busy.run_steps()
                found += busy._left_by_bad_calls()
            others = {each.what: None for each in found if each.what != found[0].what}
            self.fail(found[0], also=[*others])

    def _left_by_bad_calls(self) -> list[Finding]:
        """Go on with the next bad call on a new cache, where one left its trace in this one."""
        found: list[Finding] = []
        machine, made = self, 0
        while True:
            for bad in islice(machine._bad_calls(), made, None):
                made += 1
                if finding := machine._make_bad_call(bad):
                    found.append(finding)
                    break
            else:
                return found
            machine = Machine(type(self.adapter), self.history, attends=False)
            machine.run_steps()

    def run_steps(self) -> None:
        """Do every step, and make no bad call."""
        for operation in self._possible_operations():
            self._step(operation)
        self._finish()

    def _bad_calls(self) -> Iterable[BadCall]:
        standard = standard_bad_calls(Situation(self.adapter, self.spec, self.oracle))
        return chain(standard, self.adapter.bad_calls() if "bad_calls" in self.can else ())

    def _make_bad_call(self, bad: BadCall) -> Finding | None:
        raised: BaseException | None = None
        WATCHED.began = monotonic()
        try:
            with self.device.working():
                bad.call()
        except StepHung as hung:
            self._fail_hung(bad.words, hung)
        except BaseException as error:
            if not isinstance(error, (Exception, *bad.errors)):
                raise
            raised = error
        self._finish()
        outcome, after = Outcome(True, self.driven.options), self.look(copies=False)
        seen = self.observation(
            after, before=self.now, outcome=outcome, bad_call=bad, raised=raised
        )
        return self._first_finding(BAD_CALL, seen)

    # ---------------------------------------------------------------------------- looking

    def look(
        self, *, reads: bool = False, copies: bool = True, early: Reads | None = None
    ) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live arena.

        While the device has something to do, what is stored is left out. ``early`` was read then.
        """
        there = self.device.idle
        read = {**(early or {}), **(self._reads(("peek", "gather")) if reads and there else {})}
        books = self._books(self.adapter)
        ranks = self.adapter.shards() if "shards" in self.can else ()
        arena, scales = None, None
        if self.storage and there:
            arena, scales = self.storage.shown(copied=copies)
        counts = self.adapter.path_counts() if "path_counts" in self.can else {}
        counted = Counter({str(name): times for name, times in counts.items()})
        matched = self._matched() if reads and "matched" in self.can else {}
        return replace(
            books,
            reads=read,
            shards=[self._books(rank) for rank in ranks],
            matched=matched,
            arena=arena,
            scales=scales,
            counts=counted,
        )

    def _matched(self) -> dict[tuple[int, int], int | Exception]:
        """Look up every text, a little longer than any sequence and up to a block's edge."""
        size, texts = self.spec.block_size, self.oracle.texts
        if not texts:
            return {}
        longest = max(map(self.oracle.length, self.oracle.sequences), default=0)
        counts = {longest + 1, -(-longest // size) * size or size}
        return {
            (text, count): _asked(self._find, texts.said(text, 0, count))
            for text in range(len(self.history.texts))
            for count in counts
        }

    def _find(self, text: Said) -> int:
        self._tell_namespaces([text])
        return self.adapter.matched(text.tokens)

    def _contents(self, after: Snapshot) -> Contents:
        cached = after.ledger(0).cached
        return contents_of(self.oracle, after.tables_of(0), cached, self.contents)

    def _reads(self, routes: Iterable[str], when: str = "") -> Reads:
        return {
            (route + when, seq, layer): _asked(_read, getattr(self.adapter, route), seq, layer)
            for seq in self.oracle.readable
            for layer in range(self.spec.num_layers)
            for route in routes
            if route == "peek" or route in self.can
        }

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

    def _books(self, adapter: KVCacheAdapter) -> Snapshot:
        with self.device.working():
            return self._ask_for_books(adapter)

    def _ask_for_books(self, adapter: KVCacheAdapter) -> Snapshot:
        can, layers = adapter.abilities, range(self.spec.num_layers)
        tables, ledgers = None, []
        if "table" in can:
            tables = {
                (seq, layer): _asked(lambda *at: list(adapter.table(*at)), seq, layer)
                for layer in layers
                for seq in self.oracle.sequences
            }
        if "ledger" in can:
            ledgers = [_asked(_copied, adapter.ledger, layer) for layer in layers]
        kept = {}
        if "kept_in" in can:
            kept = {seq: _asked(adapter.kept_in, seq) for seq in self.oracle.readable}
        return Snapshot(tables=tables, kept=kept, ledgers=ledgers)

    # ---------------------------------------------------------------------------- judging

    def _judge(
        self, kind: str, before: Snapshot, outcome: Outcome, after: Snapshot, **what: Any
    ) -> Mapping[str, int]:
        """Hand an observation to all invariants that are due; return what was counted in it."""
        seen = self.observation(after, before=before, outcome=outcome, **what)
        if finding := self._first_finding(kind, seen):
            self.fail(finding)
        return seen.ran

    def _first_finding(self, kind: str, seen: Observation) -> Finding | None:
        for each in INVARIANTS:
            if kind in each.after and each.needs <= self.can:
                self.checked[each.name] += 1
                if finding := each.check(seen):
                    return finding
        return None

    def observation(self, after: Snapshot, **what: Any) -> Observation:
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            seen=self.seen,
            declared=self.declared,
            contents=self._contents(after) if after.matched else {},
            released=self.released,
            **what,
        )

    def fail(self, finding: Finding, also: Sequence[str] = ()) -> NoReturn:
        divergence = Divergence(
            finding, self._history_so_far(), self.oracle, self._books(self.adapter)
        )
        if also:
            divergence.added.append("\n".join(["Bad calls like this one:", *also]))
        raise divergence from finding.cause

    def _fail_hung(self, what: str, hung: StepHung) -> NoReturn:
        """Fail without asking the cache for its books: the answer might not come back either."""
        finding = Finding(f"{what} {hung}")
        raise Divergence(finding, self._history_so_far(), self.oracle, Snapshot()) from hung

    def _history_so_far(self) -> History:
        return replace(self.history, operations=tuple(self.done))


def _asked(ask: Callable[..., _T], *arguments: Any) -> _T | Exception:
    """Ask a cache, which may be so broken that it raises; return the error then."""
    try:
        return ask(*arguments)
    except Exception as error:
        return error


def _read(route: Callable[[int, int], Pair], seq: int, layer: int) -> Pair:
    """Copy what a sequence reads back: the next read may use the same memory."""
    keys, values = route(seq, layer)
    like = torch.contiguous_format
    return keys.clone(memory_format=like), values.clone(memory_format=like)


def _copied(ledger: Callable[[int], Ledger], layer: int) -> Ledger:
    shown = ledger(layer)
    return replace(
        shown,
        refcounts=dict(shown.refcounts),
        free=list(shown.free),
        cached=set(shown.cached),
    )


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
