"""An observation of a cache around one step: the data that every invariant judges."""

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
    from pytest_roseinfer.findings.contents import Contents
    from pytest_roseinfer.findings.released import Released
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Written

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Declared:
    """The part of an adapter's declarations that invariants need."""

    paths: Mapping[str, FastPath] = field(default_factory=dict)
    conditions: Sequence[str] = ()
    row_conditions: Mapping[str, str] = field(default_factory=dict)
    fork_shares: str = "blocks"
    sharing: str = "exact"
    match_granularity: str = "block"
    match_leaves: int = 0
    match_finds: str = "all"
    evicts: str = "any"
    window_gives_back: str = "at once"
    scratch_blocks: frozenset[int] = frozenset()

    @property
    def twins(self) -> set[str]:
        """The slow paths that others must equal."""
        return {path.equals for path in self.paths.values()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a cache shows; where asking raised an error, the error is in its place."""

    reads: Mapping[tuple[str, int, int], Pair | Exception] = field(default_factory=dict)
    """By route, sequence and layer."""
    tables: Mapping[tuple[int, int], list[int | None] | Exception] | None = None
    """Blocks, by sequence and layer; None where they are not offered."""
    kept: Mapping[int, int | list[Any] | Exception] = field(default_factory=dict)
    """The slot or list of each sequence."""
    ledgers: Sequence[Ledger | Exception] = ()
    """By layer."""
    shards: Sequence[Snapshot] = ()
    """The tables and ledgers of each rank."""
    matched: Mapping[tuple[int, int], int | Exception] = field(default_factory=dict)
    """How many tokens of a text the cache finds, by text and by how many it was asked for."""
    collided: frozenset[tuple[int, int]] = frozenset()
    """The lookups, by the same, that may have missed a block since its hash is another one's."""
    arena: Pair | None = None
    scales: Pair | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """How often each path ran and each condition was met so far."""

    def tables_of(self, layer: int) -> dict[int, list[int | None]]:
        """The blocks of every sequence in one layer."""
        tables = self.tables or {}
        return {seq: _shown(table) for (seq, at), table in tables.items() if at == layer}

    def ledger(self, layer: int) -> Ledger:
        return _shown(self.ledgers[layer])

    def owners(self, *layers: int) -> Counter[int]:
        """Count the tables of these layers that name each block."""
        tables = (table for layer in layers for table in self.tables_of(layer).values())
        return Counter(block for table in tables for block in table if block is not None)

    def books(self) -> list[object]:
        """Everything that the cache's books say, in a form that can be compared."""
        books: list[object] = [(key, _shown(table)) for key, table in (self.tables or {}).items()]
        for ledger in map(_shown, self.ledgers):
            books.append((ledger.refcounts, sorted(ledger.free), ledger.swapped, ledger.num_free))
        return books


def _shown(value: _T | Exception) -> _T:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    fits: bool = True
    """There was room for all of it; if not, it was refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The switches it was planned under."""
    written: Written | None = None
    """The tokens that it stored; of a refused step, those of the rows that were admitted."""
    met: Counter[str] = field(default_factory=Counter)
    """The conditions that the rows it stored met."""


@dataclass(frozen=True, slots=True)
class Attended:
    """One answer of a cache that was asked for attention."""

    seqs: Sequence[int]
    layer: int
    query: torch.Tensor
    """``[len(seqs), q_heads, head_dim]``"""
    found: torch.Tensor | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A cache before and after a step, the step, and the oracle that says what is right."""

    spec: CacheSpec
    operation: Operation | None = None
    """None where the cache was asked for attention, or a bad call was made."""
    before: Snapshot = field(default_factory=Snapshot)
    outcome: Outcome = field(default_factory=Outcome)
    after: Snapshot
    oracle: Oracle
    """What the cache must hold after the step."""
    payload: Payload
    seen: Mapping[int, int] = field(default_factory=dict)
    """Every token that was ever to be written, and the sequence that was the first to do it."""
    contents: Mapping[int, Contents] = field(default_factory=dict)
    """What blocks hold after the step, by a layer of each group of them that has the same blocks;
    known where lookups are asked for."""
    released: Mapping[int, Released] = field(default_factory=dict)
    """The blocks that were kept for later texts before the step, where their order is declared."""
    declared: Declared = field(default_factory=Declared)
    attended: Sequence[Attended] = ()
    bad_call: BadCall | None = None
    raised: BaseException | None = None
    """What the bad call raised."""

    @property
    def ran(self) -> dict[str, int]:
        """The paths and conditions that were counted in this step."""
        before, after = self.before.counts, self.after.counts
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}

    def slots(self, layer: int) -> list[tuple[int | None, int]]:
        """The block and position where each token just written must lie, in written order.

        The block is None if the write gave it back, since it had left the window.
        """
        slots: list[tuple[int | None, int]] = []
        if written := self.outcome.written:
            size, tables = self.spec.block_size, self.after.tables_of(layer)
            for seq, count in written.rows:
                length = self.oracle.length(seq)
                ends = range(length - count, length)
                slots += [(tables[seq][at // size], at % size) for at in ends]
        return slots
