"""An observation of a cache around one step, the invariants that judge it, and their findings."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_roseinfer.capabilities.payload import as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import (
        BadCall,
        CacheSpec,
        Event,
        Ledger,
        Transfer,
    )
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.capabilities.payload import HeadMismatch, Payload
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Written

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Keys and values."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The visible state of a cache; an error that a method raised stands for its return value."""

    reads: Mapping[tuple[str, int, int], Pair | Exception] = field(default_factory=dict)
    """Keys and values, by route, sequence and layer."""
    first_reads: Mapping[tuple[int, int, int], Pair | Exception] = field(default_factory=dict)
    """Keys and values of the first tokens, by sequence, layer and number of tokens."""
    tables: Mapping[tuple[int, int], list[int | None] | Exception] | None = None
    """Blocks, by sequence and layer; None if the adapter has no ``table``."""
    containers: Mapping[int, int | list[Any] | Exception] = field(default_factory=dict)
    """Slot or list of each sequence."""
    ledgers: Sequence[Ledger | Exception] = ()
    """Ledgers, by layer."""
    shards: Sequence[Snapshot] = ()
    """Tables and ledgers of each rank."""
    matches: Mapping[tuple[int, int], int | Exception] = field(default_factory=dict)
    """Number of tokens that a lookup found, by text and number of tokens looked up."""
    tier_matches: Mapping[tuple[int, int], int | Exception] = field(default_factory=dict)
    """Number of tokens that a lookup found in all tiers, by the keys of ``matches``."""
    collided: frozenset[tuple[int, int]] = frozenset()
    """Lookups that may have missed a block because of a hash collision, by the keys of
    ``matches``."""
    transfers: Sequence[Transfer] | Exception = ()
    """Transfers in flight between tiers, and from a prefill cache."""
    blocks_in_flight: Counter[int] = field(default_factory=Counter)
    """Number of transfers in flight that hold each block."""
    blocks_of_stores: frozenset[int] = frozenset()
    """Blocks that stores in flight hold, which keep their contents until the store ends."""
    arena: Pair | None = None
    scales: Pair | None = None
    states: Mapping[int, torch.Tensor | Exception] = field(default_factory=dict)
    """State of each sequence, ``[layers, heads, head_dim]``."""
    auxiliary_vectors: Mapping[tuple[int, int, int], Mapping[str, torch.Tensor] | Exception] = (
        field(default_factory=dict)
    )
    """Auxiliary vectors, ``[tokens, width]`` for each name, by rank, sequence and layer."""
    events: Sequence[Event] | Exception = ()
    """Events since the latest snapshot that has any."""
    remote_reads: Mapping[tuple[int, int], Pair | Exception] = field(default_factory=dict)
    """Keys and values in the prefill cache, by sequence and layer."""
    remote_free_blocks: int | Exception | None = None
    """Free blocks of the prefill cache; None if there is no such cache."""
    receive_statuses: Mapping[int, str | Exception] = field(default_factory=dict)
    """Status of each receive, by sequence."""
    counts: Counter[str] = field(default_factory=Counter)
    """Runs of each path and times each condition was met, since ``make``."""
    _of_layers: dict[int, Mapping[int, list[int | None]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cached results of ``tables_of``."""

    def tables_of(self, layer: int) -> Mapping[int, list[int | None]]:
        """Return the blocks of every sequence in one layer."""
        if layer not in self._of_layers:
            tables = self.tables_or_errors(layer).items()
            self._of_layers[layer] = {seq: _value_or_raise(table) for seq, table in tables}
        return self._of_layers[layer]

    def tables_or_errors(self, layer: int) -> dict[int, list[int | None] | Exception]:
        """Return the tables of a layer for a picture, with errors in place of unreadable ones."""
        return {seq: table for (seq, at), table in (self.tables or {}).items() if at == layer}

    def ledger(self, layer: int) -> Ledger:
        return _value_or_raise(self.ledgers[layer])

    def ledger_or_none(self, layer: int) -> Ledger | None:
        """Return the ledger of a layer for a picture; None if the cache shows none."""
        ledger = self.ledgers[layer] if self.ledgers else None
        return None if isinstance(ledger, Exception) else ledger

    def owners(self, *layers: int) -> Counter[int]:
        """Count the tables of these layers that name each block."""
        tables = (table for layer in layers for table in self.tables_of(layer).values())
        return Counter(block for table in tables for block in table if block is not None)

    def tables_and_ledgers(self) -> list[object]:
        """Return all tables and ledgers in a form that can be compared."""
        books: list[object] = [
            (key, _value_or_raise(table)) for key, table in (self.tables or {}).items()
        ]
        for ledger in map(_value_or_raise, self.ledgers):
            books.append((ledger.refcounts, sorted(ledger.free), ledger.swapped, ledger.num_free))
        return books


def _value_or_raise(value: _T | Exception) -> _T:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    fits: bool = True
    """True if there was room for the whole step; otherwise it was refused."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of the switches when the step was planned."""
    written: Written | None = None
    """Stored tokens; of a refused step, those of the admitted rows; None if it stores none."""
    refusal: str = ""
    """Reason why the step had to be refused; empty if it did not."""


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """The output of one attention call."""

    seqs: Sequence[int]
    layer: int
    query: torch.Tensor
    """``[len(seqs), q_heads, head_dim]``"""
    actual: torch.Tensor | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A cache before and after a step, the step, and the oracle of the expected contents."""

    spec: CacheSpec
    declared: type[Any]
    """The adapter class, for its declarations."""
    scratch_blocks: frozenset[int] = frozenset()
    """Blocks that padding may write to."""
    operation: Operation | None = None
    """The step; None after attention or a bad call."""
    before: Snapshot = field(default_factory=Snapshot)
    outcome: Outcome = field(default_factory=Outcome)
    after: Snapshot
    oracle: Oracle
    """Expected contents after the step."""
    payload: Payload
    first_writers: Mapping[int, int] = field(default_factory=dict)
    """The first sequence that wrote each token, by token; refused writes count too."""
    notes: Mapping[Any, Any] = field(default_factory=dict)
    """Facts about earlier steps, by the kind of observer that recorded them."""
    answers: Sequence[AttentionOutput] = ()
    """Results of an inquiry between two steps."""
    bad_call: BadCall | None = None
    raised: BaseException | None = None
    """Error that the bad call raised; None if it raised none."""

    @property
    def step_counts(self) -> dict[str, int]:
        """Changes in the counts of paths and conditions during this step, without zeros."""
        before, after = self.before.counts, self.after.counts
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}

    def slots(self, layer: int) -> list[tuple[int | None, int]]:
        """Return the block and position of each token just written, in the order of the write.

        The block is None if the write freed it because it had left the window.
        """
        slots: list[tuple[int | None, int]] = []
        if written := self.outcome.written:
            size, tables = self.spec.block_size, self.after.tables_of(layer)
            for seq, count in written.rows:
                length = self.oracle.length(seq)
                ends = range(length - count, length)
                slots += [(tables[seq][at // size], at % size) for at in ends]
        return slots


# Findings


@dataclass(frozen=True, slots=True)
class Location:
    """A sequence, one of its blocks, or a position in a block, in one layer."""

    layer: int
    holders: Mapping[int, int | None]
    """Index of the block in each holder's table, by sequence; None if unknown."""
    block: int | None = None
    """Number of the block; None if the location is a sequence's."""
    slot: int | None = None
    """Position within the block; None for the whole block."""
    contents: HeadMismatch | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of an invariant, in words."""

    summary: str
    location: Location | None = None
    cause: BaseException | None = None
    """Error that the cache raised; None if it raised none."""
    on_refused_step: bool = False
    """True if a step that had to be refused raised the error."""
    kind: str = ""
    """Kind of difference, without numbers of the history, for digests. The name of the invariant
    goes before it. Changing it changes the digests in users' files."""


def describe_error(error: BaseException) -> str:
    """Return the class name of an error, and its message if it has one.

    Python's message on two sequences of different lengths names neither: the line is added.
    """
    words = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, ValueError) and str(error).startswith("zip() argument"):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        return f"{words} ({place}: {frame.line}); one of them is stale"
    return words


def location_of_block(
    observation: Observation,
    layer: int,
    block: int,
    slot: int | None = None,
    contents: HeadMismatch | None = None,
) -> Location:
    """Locate a block in every table that names it."""
    tables = observation.after.tables_of(layer)
    holders = {seq: table.index(block) for seq, table in tables.items() if block in table}
    return Location(layer, holders, block, slot, contents)


def find_change(
    observation: Observation, expected: Pair | None, actual: Pair | None
) -> tuple[Location, HeadMismatch] | None:
    """Find the first difference of two arenas; None if they are equal or not shown."""
    if expected is None or actual is None:
        return None
    for kind, was, now in zip("KV", expected, actual, strict=True):
        if same_bits(was, now):
            continue
        wrong = (as_bits(was) != as_bits(now)).any(-1)
        layer, block, head, slot = wrong.nonzero()[0].tolist()
        rows = was[layer, block, head, slot], now[layer, block, head, slot]
        contents = observation.payload.describe_mismatch(
            *rows, layer, head, kind, sorted(observation.first_writers)
        )
        return location_of_block(observation, layer, block, slot, contents), contents
    return None


def find_misplaced(arena: Pair, layer: int, kind: str, head: int, missing: torch.Tensor) -> str:
    """Describe the position of a layer that holds a missing row; empty if none does."""
    stored = arena["KV".index(kind)][layer]
    places = (as_bits(stored) == as_bits(missing.contiguous())).all(-1).nonzero().tolist()
    for block, other, slot in places:
        of_head = f", head {other}" if other != head else ""
        return f"; the right one lies in block {block}, position {slot}{of_head}"
    return ""


AFTER_STEP, AFTER_ATTENTION, AFTER_BAD_CALL = "operation", "attention", "bad call"
"""Kinds of observations, by the event that they follow."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A check of observations, and the observations that it applies to."""

    name: str
    """Name in reports."""
    check: Callable[[Observation], Finding | None]
    rank: int
    """Position in the order of checks; the lowest goes first, since its findings explain most."""
    needs: frozenset[str]
    """Features that a cache must have for it, as in ``Run.features``."""
    after: frozenset[str]
    """Kinds of observations that it applies to."""

    def __call__(self, observation: Observation) -> Finding | None:
        return self.check(observation)


def invariant(
    *, rank: int, needs: Iterable[str] = (), after: Iterable[str] = (AFTER_STEP,)
) -> Callable[[Callable[[Observation], Finding | None]], Invariant]:
    """Turn a function into an invariant of the same name."""
    scope = rank, frozenset(needs), frozenset(after)
    return lambda check: Invariant(check.__name__, check, *scope)
