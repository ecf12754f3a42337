"""An observation of a cache around one step, the invariants that judge it, and their findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_roseinfer.capabilities.payload import as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import BadCall, CacheSpec, Ledger
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.capabilities.payload import Contents, Payload
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Written

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values."""
_T = TypeVar("_T")


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
    matches: Mapping[tuple[int, int], int | Exception] = field(default_factory=dict)
    """How many tokens of a text the cache finds, by text and by how many it was asked for."""
    collided: frozenset[tuple[int, int]] = frozenset()
    """The lookups, by the same, that may have missed a block since its hash is another one's."""
    arena: Pair | None = None
    scales: Pair | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """How often each path ran and each condition was met so far."""
    _of_layers: dict[int, Mapping[int, list[int | None]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The answers of ``tables_of`` by now."""

    def tables_of(self, layer: int) -> Mapping[int, list[int | None]]:
        """The blocks of every sequence in one layer."""
        if layer not in self._of_layers:
            tables = self.tables_or_errors(layer).items()
            self._of_layers[layer] = {seq: _shown(table) for seq, table in tables}
        return self._of_layers[layer]

    def tables_or_errors(self, layer: int) -> dict[int, list[int | None] | Exception]:
        """The same for a picture: an error is in the place of a table that cannot be read."""
        return {seq: table for (seq, at), table in (self.tables or {}).items() if at == layer}

    def ledger(self, layer: int) -> Ledger:
        return _shown(self.ledgers[layer])

    def ledger_or_none(self, layer: int) -> Ledger | None:
        """The same for a picture: None where the cache has no ledger, or it cannot be read."""
        ledger = self.ledgers[layer] if self.ledgers else None
        return None if isinstance(ledger, Exception) else ledger

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
    refusal: str = ""
    """Why it had to be refused; empty where it was not."""


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
    declared: type[Any]
    """The class of the adapter, for what it declares of its cache."""
    scratch_blocks: frozenset[int] = frozenset()
    """Blocks that padding may write to."""
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
    notes: Mapping[Any, Any] = field(default_factory=dict)
    """What observers know that no single step shows, by their kinds."""
    answers: Sequence[Attended] = ()
    """The cache's answers, where it was asked between two steps."""
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


# A finding: its words, its location, and where a misplaced token lies.


@dataclass(frozen=True, slots=True)
class Location:
    """A sequence, one of its blocks, or a slot of that, in one layer."""

    layer: int
    holders: Mapping[int, int | None]
    """The sequences that hold it, and which of their blocks it is; None where that is unknown."""
    block: int | None = None
    """The block's number, where a block was looked at and not a sequence."""
    slot: int | None = None
    """Position within the block."""
    contents: Contents | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in words."""

    what: str
    location: Location | None = None
    cause: BaseException | None = None
    """What the cache raised."""
    without_room: bool = False
    """It was raised by a step that had to be refused."""


def in_words(error: BaseException) -> str:
    """Return what an error is called and what it says, if that is anything."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def location_of_block(
    seen: Observation,
    layer: int,
    block: int,
    slot: int | None = None,
    contents: Contents | None = None,
) -> Location:
    """Locate a block in every table that names it."""
    tables = seen.after.tables_of(layer)
    holders = {seq: table.index(block) for seq, table in tables.items() if block in table}
    return Location(layer, holders, block, slot, contents)


def find_change(
    seen: Observation, expected: Pair | None, found: Pair | None
) -> tuple[Location, Contents] | None:
    """Find the first slot in which two arenas differ, if both are shown and do."""
    if expected is None or found is None:
        return None
    for kind, was, now in zip("KV", expected, found, strict=True):
        if same_bits(was, now):
            continue
        wrong = (as_bits(was) != as_bits(now)).any(-1)
        layer, block, head, slot = wrong.nonzero()[0].tolist()
        rows = was[layer, block, head, slot], now[layer, block, head, slot]
        contents = seen.payload.contents(*rows, layer, head, kind, sorted(seen.seen))
        return location_of_block(seen, layer, block, slot, contents), contents
    return None


# Where a token lies that is not where it must be.


def elsewhere(arena: Pair, layer: int, kind: str, head: int, missing: torch.Tensor) -> str:
    """Say which slot of a layer holds what is missing; nothing if none does."""
    held = arena["KV".index(kind)][layer]
    places = (as_bits(held) == as_bits(missing.contiguous())).all(-1).nonzero().tolist()
    for block, other, slot in places:
        of_head = f", head {other}" if other != head else ""
        return f"; the right one lies in block {block}, position {slot}{of_head}"
    return ""


AFTER_STEP, AFTER_ATTENTION, AFTER_BAD_CALL = "operation", "attention", "bad call"
"""What an observation can be made after."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A check of an observation, and when it is due."""

    name: str
    """How reports call it."""
    check: Callable[[Observation], Finding | None]
    rank: int
    """The lowest rank is judged first: what it finds explains most."""
    needs: frozenset[str]
    """What an adapter must offer for it; "windows" where layers have some."""
    after: frozenset[str]

    def __call__(self, seen: Observation) -> Finding | None:
        return self.check(seen)


def invariant(
    *, rank: int, needs: Iterable[str] = (), after: Iterable[str] = (AFTER_STEP,)
) -> Callable[[Callable[[Observation], Finding | None]], Invariant]:
    """Make a function an invariant of the same name."""
    due = rank, frozenset(needs), frozenset(after)
    return lambda check: Invariant(check.__name__, check, *due)
