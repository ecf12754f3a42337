"""What was seen of a cache around one step: the data that every invariant judges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.adapters.cache import BadCall, CacheSpec, Ledger
    from pytest_roseinfer.adapters.fast_path import FastPath
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.cases.payload import Payload
    from pytest_roseinfer.oracle import Oracle, Written

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Declared:
    """What an adapter says of its cache."""

    paths: Mapping[str, FastPath] = field(default_factory=dict)
    conditions: Sequence[str] = ()
    row_conditions: Mapping[str, str] = field(default_factory=dict)
    fork_shares: str = "blocks"
    scratch_blocks: frozenset[int] = frozenset()

    @property
    def twins(self) -> set[str]:
        """The slow paths that others must equal."""
        return {path.equals for path in self.paths.values()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a cache shows at one moment, as far as it offers that.

    Where asking raised an error, the error stands in place of the answer.
    """

    reads: Mapping[tuple[str, int, int], Pair | Exception] = field(default_factory=dict)
    """By route, sequence and layer."""
    tables: Mapping[tuple[int, int], list[int] | Exception] | None = None
    """Blocks, by sequence and layer; None where they are not offered."""
    ledgers: Sequence[Ledger | Exception] = ()
    """By layer."""
    arena: Pair | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """How often each path ran and each condition was met so far."""

    def table(self, seq: int, layer: int) -> list[int]:
        return _shown((self.tables or {})[seq, layer])

    def tables_of(self, layer: int) -> dict[int, list[int]]:
        """The blocks of every sequence in one layer."""
        tables = self.tables or {}
        return {seq: _shown(table) for (seq, at), table in tables.items() if at == layer}

    def ledger(self, layer: int) -> Ledger:
        return _shown(self.ledgers[layer])

    def owners(self, layer: int) -> Counter[int]:
        """How many tables name each block of a layer."""
        return Counter(block for table in self.tables_of(layer).values() for block in table)

    def books(self) -> list[object]:
        """Everything that the cache's books say, in a form that can be compared."""
        books: list[object] = [(key, _shown(table)) for key, table in (self.tables or {}).items()]
        ledgers = map(_shown, self.ledgers)
        return books + [(ledger.refcounts, sorted(ledger.free)) for ledger in ledgers]


def _shown(value: _T | Exception) -> _T:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step."""

    fits: bool = True
    """There was room for it; if not, it was refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The switches it was planned under."""
    written: Written | None = None
    met: Counter[str] = field(default_factory=Counter)
    """What its rows found at the end of their sequences."""


@dataclass(frozen=True, slots=True)
class Attended:
    """One answer of a cache that was asked for attention."""

    seqs: Sequence[int]
    layer: int
    query: torch.Tensor
    """``[len(seqs), q_heads, head_dim]``"""
    found: torch.Tensor | Exception


@dataclass(frozen=True, slots=True)
class Called:
    """A call that a cache was to refuse."""

    call: BadCall
    raised: BaseException | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A cache before and after a step, what was done to it, and what is right."""

    spec: CacheSpec
    operation: Operation | None = None
    """None where the cache was asked for attention, or a bad call was made."""
    before: Snapshot = field(default_factory=Snapshot)
    outcome: Outcome = field(default_factory=Outcome)
    after: Snapshot
    oracle: Oracle
    """What the cache must hold after the step."""
    payload: Payload
    seen: frozenset[int] | set[int] = frozenset()
    """Every token that was ever to be written."""
    declared: Declared = field(default_factory=Declared)
    attended: Sequence[Attended] = ()
    called: Called | None = None

    @property
    def ran(self) -> dict[str, int]:
        """What was counted in this step."""
        before, after = self.before.counts, self.after.counts
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}

    def slots(self, layer: int) -> list[tuple[int, int]]:
        """The block and position where each token just written must lie, in written order."""
        size = self.spec.block_size
        slots: list[tuple[int, int]] = []
        for seq, count in self.outcome.written.rows if self.outcome.written else ():
            table, length = self.after.table(seq, layer), self.oracle.length(seq)
            slots += [(table[at // size], at % size) for at in range(length - count, length)]
        return slots
