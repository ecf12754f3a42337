"""Runs a history on a cache and its oracle side by side, and has each step judged.

The machine drives the cache, asks it for attention, makes its bad calls, and poisons the blocks
it gives back. It makes an observation of each step, which invariants judge.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pytest_roseinfer import invariants
from pytest_roseinfer.adapters.cache import Ledger
from pytest_roseinfer.adapters.used_again import USED_AGAIN
from pytest_roseinfer.cases.history import History
from pytest_roseinfer.cases.operations.operation import Driven
from pytest_roseinfer.cases.payload import Payload, lay_out
from pytest_roseinfer.discover import import_all
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.findings.observation import (
    Attended,
    Declared,
    Observation,
    Outcome,
    Snapshot,
)
from pytest_roseinfer.invariants.attention import EVERY, questions
from pytest_roseinfer.invariants.counts import conditions_met
from pytest_roseinfer.invariants.invariant import ATTENTION, BAD_CALL, INVARIANTS, OPERATION
from pytest_roseinfer.invariants.own_conditions import OWN_CONDITIONS, own_conditions_met
from pytest_roseinfer.oracle import Oracle
from pytest_roseinfer.running.used_again import UsedAgain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import NoReturn

    from pytest_roseinfer.adapters.cache import BadCall, KVCacheAdapter
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.findings.observation import Pair

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
        self.can = adapter_type.abilities
        if lacking := {need for step in history.operations for need in step.needs} - self.can:
            raise TypeError(f"{adapter_type.__name__} does not define {', '.join(sorted(lacking))}")
        self.attends = attends and "attend" in self.can
        self.oracle = Oracle(
            spec.block_size,
            spec.num_blocks,
            adapter_type.fork_shares,
            adapter_type.atomic_batches,
        )
        self.payload = Payload(spec, history.finite)
        self.adapter = adapter_type()
        self.adapter.make(spec)
        self.driven = Driven(self.adapter, spec.options)
        self.declared = Declared(
            self.adapter.paths,
            self.adapter.conditions,
            self.adapter.row_conditions,
            self.adapter.fork_shares,
            self.adapter.scratch_blocks,
        )
        self.own_conditions = [name for name in OWN_CONDITIONS if name in self.adapter.conditions]
        self.shown_again = [name for name in USED_AGAIN if name in self.adapter.conditions]
        self.used_again = UsedAgain() if self.shown_again else None
        self.checked = Counter({each.name: 0 for each in INVARIANTS})
        """How often each invariant was checked."""
        self.done: list[Operation] = []
        self.seen: set[int] = set()
        """Every token that was ever to be written."""
        if "arena" in self.can:
            for cache in self.adapter.arena():
                cache.fill_(_POISON)
        self.now = self.look()
        """The cache after the latest step."""

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and each condition was met."""
        return sum(self.steps(), Counter())

    def steps(self) -> Iterator[Counter[str]]:
        """Do one step after the other; yield what was counted in each."""
        for operation in self.history.operations:
            yield self._step(operation)
        if "bad_calls" in self.can:
            for bad in self.adapter.bad_calls():
                self._make_bad_call(bad)

    def _step(self, operation: Operation) -> Counter[str]:
        counted: Counter[str] = Counter()
        if self.own_conditions:
            met = own_conditions_met(self.oracle, operation)
            counted.update({name: met[name] for name in self.own_conditions if met[name]})
        self.done.append(operation)
        outcome = self._do(operation)
        before, self.now = self.now, self.look(reads=True)
        counted.update(self._judge(OPERATION, before, outcome, self.now, operation=operation))
        if self.used_again:
            met = self.used_again.met(self.driven, self.now)
            counted.update({name: met[name] for name in self.shown_again if met[name]})
        self._poison_what_was_freed(before)
        done = len(self.done)
        if self.attends and (done % EVERY == 0 or done == self.history.size):
            counted.update(self._ask_for_attention())
        return counted

    # ----------------------------------------------------------------------------- acting

    def _do(self, operation: Operation) -> Outcome:
        """Do a step to the oracle and to the cache, which must refuse it where it does not fit."""
        oracle, driven, rows = self.oracle, self.driven, operation.rows()
        name, room = "step", ""
        if rows:
            needed, free = oracle.pages_needed(rows), oracle.pages_free()
            name, room = "write", f" ({needed} blocks needed, {free} free)"
        admitted, written = operation.admitted(oracle), operation.written(oracle)
        fits, stored, met = admitted is operation, None, Counter[str]()
        if admitted:
            stored = written if fits else admitted.written(oracle)
            if self.declared.row_conditions:
                met = conditions_met(oracle, admitted)
            admitted.change(oracle)
        if written:
            self.seen.update(written.tokens)
            tokens = operation.inputs(written.tokens)
            driven.key, driven.value = self.payload.inputs(tokens, written.layout)
        driven.planned_with = driven.options
        try:
            operation.drive(driven)
        except self.adapter.full_errors as error:
            if fits:
                self.fail(Finding(f"refused a {name} that fits{room}: {error}", cause=error))
        except Exception as error:
            what = f"the {name} raised {type(error).__name__}: {error}"
            self.fail(Finding(what, cause=error))
        else:
            if not fits:
                self.fail(Finding(f"accepted a {name} that does not fit{room}"))
        if written:
            # A cache that keeps what it was handed reads poison from here on.
            driven.key.fill_(_POISON)
            driven.value.fill_(_POISON)
        return Outcome(fits, driven.planned_with, stored, met)

    def _poison_what_was_freed(self, before: Snapshot) -> None:
        """Overwrite the blocks that were given back, in the cache and in its snapshot."""
        if before.arena is None or self.now.arena is None or "table" not in self.can:
            return
        for layer in range(self.spec.num_layers):
            for block in before.owners(layer).keys() - self.now.owners(layer).keys():
                for cache in (*self.adapter.arena(), *self.now.arena):
                    cache[layer, block].fill_(_POISON)

    def _ask_for_attention(self) -> Mapping[str, int]:
        answers: list[Attended] = []
        for seqs, query, layout, layer in questions(self.payload, self.oracle, len(self.done)):
            laid_out = lay_out(query[None], layout)[0]
            found = _asked(self.adapter.attend, list(seqs), laid_out, layer)
            answers.append(Attended(seqs, layer, query, found))
            if isinstance(found, Exception):
                break
        if not answers:
            return {}
        before, after = self.now, self.look(copies=False)
        outcome = Outcome(True, self.driven.options)
        # Asking changes nothing that is stored, so the copy of it serves the next step too.
        self.now = replace(before, counts=after.counts)
        return self._judge(ATTENTION, before, outcome, after, attended=answers)

    def _make_bad_call(self, bad: BadCall) -> None:
        raised: BaseException | None = None
        try:
            bad.call()
        except BaseException as error:
            if not isinstance(error, (Exception, *bad.errors)):
                raise
            raised = error
        outcome, after = Outcome(True, self.driven.options), self.look(copies=False)
        self._judge(BAD_CALL, self.now, outcome, after, bad_call=bad, raised=raised)

    # ---------------------------------------------------------------------------- looking

    def look(self, *, reads: bool = False, copies: bool = True) -> Snapshot:
        """Take a snapshot of the cache; without ``copies``, of its live arena."""
        read = self._reads() if reads else {}
        books = self._books()
        arena = self.adapter.arena() if "arena" in self.can else None
        if arena and copies:
            arena = (arena[0].clone(), arena[1].clone())
        counts = self.adapter.path_counts() if "path_counts" in self.can else {}
        counted = Counter({str(name): times for name, times in counts.items()})
        return replace(books, reads=read, arena=arena, counts=counted)

    def _reads(self) -> dict[tuple[str, int, int], Pair | Exception]:
        routes = ("peek", "gather") if "gather" in self.can else ("peek",)
        return {
            (route, seq, layer): _asked(_read, getattr(self.adapter, route), seq, layer)
            for seq in self.oracle.sequences
            for layer in range(self.spec.num_layers)
            for route in routes
        }

    def _books(self) -> Snapshot:
        adapter, layers = self.adapter, range(self.spec.num_layers)
        tables, ledgers = None, []
        if "table" in self.can:
            tables = {
                (seq, layer): _asked(lambda *at: list(adapter.table(*at)), seq, layer)
                for layer in layers
                for seq in self.oracle.sequences
            }
        if "ledger" in self.can:
            ledgers = [_asked(_copied, adapter.ledger, layer) for layer in layers]
        kept = {}
        if "kept_in" in self.can:
            kept = {seq: _asked(adapter.kept_in, seq) for seq in self.oracle.sequences}
        return Snapshot(tables=tables, kept=kept, ledgers=ledgers)

    # ---------------------------------------------------------------------------- judging

    def _judge(
        self, kind: str, before: Snapshot, outcome: Outcome, after: Snapshot, **what: Any
    ) -> Mapping[str, int]:
        """Hand an observation to all invariants that are due; return what was counted in it."""
        seen = self.observation(after, before=before, outcome=outcome, **what)
        for each in INVARIANTS:
            if kind in each.after and each.needs <= self.can:
                self.checked[each.name] += 1
                if finding := each.check(seen):
                    self.fail(finding)
        return seen.ran

    def observation(self, after: Snapshot, **what: Any) -> Observation:
        return Observation(
            spec=self.spec,
            after=after,
            oracle=self.oracle,
            payload=self.payload,
            seen=self.seen,
            declared=self.declared,
            **what,
        )

    def fail(self, finding: Finding) -> NoReturn:
        done = History(self.spec, tuple(self.done), finite=self.payload.finite)
        raise Divergence(finding, done, self.oracle, self._books()) from finding.cause


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
    return Ledger(dict(shown.refcounts), list(shown.free), shown.total)


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raise ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
