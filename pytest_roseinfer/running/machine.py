"""Runs a history on a cache and its oracle side by side, checking everything after each step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.cache import KVCacheAdapter, abilities
from pytest_roseinfer.cases.payload import Payload
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.invariants.arena import check_arena, slots_of
from pytest_roseinfer.invariants.attention import EVERY, check_attention
from pytest_roseinfer.invariants.bad_calls import check_bad_calls
from pytest_roseinfer.invariants.counts import check_counts, conditions_met
from pytest_roseinfer.invariants.own_conditions import own_conditions_met
from pytest_roseinfer.invariants.ownership import check_ownership
from pytest_roseinfer.invariants.read_back import check_read_back
from pytest_roseinfer.oracle import Oracle
from pytest_roseinfer.running.execute import Reservation, do
from pytest_roseinfer.running.snapshot import books_of, take_snapshot

if TYPE_CHECKING:
    from typing import NoReturn

    from pytest_roseinfer.cases.history import History, Operation
    from pytest_roseinfer.findings.location import Place


class Machine:
    """One cache under test, its oracle, and what was done to them so far."""

    def __init__(
        self, adapter_type: type[KVCacheAdapter], history: History, *, attends: bool = True
    ) -> None:
        self.history = history
        self.attends = attends
        """Whether attention is looked at: of two runs that are compared, it need not be."""
        self.spec = history.spec
        self.can = abilities(adapter_type)
        self.oracle = Oracle(self.spec.block_size, self.spec.num_blocks, adapter_type.fork_shares)
        self.payload = Payload(self.spec, history.finite)
        self.adapter = adapter_type()
        self.adapter.make(self.spec)
        self.counts: Counter[str] = Counter()
        """How often each path ran and each condition was met."""
        self.done: list[Operation] = []
        self.seen: set[int] = set()
        """Every token that was ever to be written."""
        self.reserved: list[Reservation] = []
        """Those not filled yet, the oldest first."""
        self.options = self.spec.options
        """The switches as they stand."""
        if "arena" in self.can:
            for cache in self.adapter.arena():
                cache.fill_(float("nan"))

    def run(self) -> Counter[str]:
        """Do every step; return how often each path ran and condition was met."""
        for step in self.history.operations:
            self.step(step)
        if "bad_calls" in self.can:
            check_bad_calls(self)
        return self.counts

    def step(self, step: Operation) -> None:
        before = take_snapshot(self)
        met = conditions_met(self.oracle, step)
        own_met = own_conditions_met(self.oracle, step)
        self.done.append(step)
        outcome = do(self, step)
        check_read_back(self)
        if {"ledger", "table"} <= self.can:
            check_ownership(self)
        if not outcome.fits and books_of(self) != before.books:
            self.fail("a step that found no room changed the books")
        slots = slots_of(self, outcome)
        if before.arena is not None:
            check_arena(self, outcome, slots, before)
        if "path_counts" in self.can:
            check_counts(self, outcome, before.counts, met, slots)
        self._count_declared(own_met)
        if "attend" in self.can and self.attends and self._is_time_to_attend():
            check_attention(self)

    def _count_declared(self, met: Counter[str]) -> None:
        declared = self.adapter.conditions
        self.counts.update({name: times for name, times in met.items() if name in declared})

    def _is_time_to_attend(self) -> bool:
        return len(self.done) % EVERY == 0 or len(self.done) == self.history.size

    def fail(
        self, what: str, cause: BaseException | None = None, *, place: Place | None = None
    ) -> NoReturn:
        raise Divergence(self, what, place) from cause


def run_history(adapter: type[KVCacheAdapter], history: History) -> Counter[str]:
    """Replay a history on a fresh cache; raises ``Divergence`` where cache and oracle differ."""
    return Machine(adapter, history).run()
