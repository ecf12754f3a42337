"""Bookkeeping of a cache: block tables, refcounts, free blocks, and slots of sequences."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.cache_data import Ledger
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    RankPolicy,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    invariant,
    location_of_block,
)
from pytest_roseinfer.capabilities.operation import call_or_error
from pytest_roseinfer.oracle.pages import NEXT_TRY, State
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Page


class BlockTableMethods:
    """Adapter methods that show the cache's bookkeeping."""

    lookahead_blocks: ClassVar[int] = 0
    """Most blocks at the end of a table that hold no token yet, as for drafts or reserved output.
    No other table names them, no lookup finds them, and they become free with the sequence's other
    blocks. A step may be refused if fewer blocks are free than its tokens need, and so many more
    for each of its sequences. Needs ``table`` and ``ledger``."""

    @optional
    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        """Return the blocks of a sequence, as indices into ``arena``'s block dimension.

        None stands for a block that was freed because it left the layer's window.
        """

    @optional
    def ledger(self, layer: int) -> Ledger:
        """Return the cache's bookkeeping of one layer. With it, histories also run out of room."""


@invariant(rank=20, needs=("ledger", "table"))
def ownership(observation: Observation) -> Finding | None:
    """Tables, refcounts and free blocks must agree with each other and with the oracle."""
    for layer in range(observation.spec.num_layers):
        if finding := _wrong_books(observation, layer) or _wrong_sharing(observation, layer):
            return finding
    return None


def _wrong_books(observation: Observation, layer: int) -> Finding | None:
    """Find refcounts or free blocks that disagree with the tables, or with the cache's count."""
    owners = observation.after.owners(*observation.oracle.pool_of(layer))
    ledger = observation.after.ledger(layer)
    refcounts = {block: count for block, count in ledger.refcounts.items() if count}
    in_flight = observation.after.blocks_in_flight  # a transfer may hold its blocks
    if wrong := [
        block
        for block in refcounts.keys() | owners.keys()
        if not 0 <= refcounts.get(block, 0) - owners[block] <= in_flight[block]
    ]:
        first = min(wrong)
        location = location_of_block(observation, layer, first)
        times = format_count(owners[first], "time")
        counts = f"refcount {refcounts.get(first, 0)}, and tables name it {times}"
        problem = f"layer {layer}: block {first} has {counts}{_describe_holders(location)}"
        return Finding(problem, location, kind="refcount")
    if len(set(ledger.free)) < len(ledger.free):
        twice = max(ledger.free, key=list(ledger.free).count)
        problem = f"layer {layer}: the free list names a block twice: {ledger.free}"
        return Finding(problem, location_of_block(observation, layer, twice), kind="free twice")
    held = {*owners, *refcounts}
    if both := set(ledger.free) & held:
        location = location_of_block(observation, layer, min(both))
        return Finding(
            f"layer {layer}: block {location.block} is free, and held{_describe_holders(location)}",
            location,
            kind="free and held",
        )
    if len(ledger.free) + len(held) != ledger.total:
        return Finding(
            f"layer {layer}: {len(ledger.free)} free + {len(held)} held blocks are not "
            f"the {ledger.total} there are",
            kind="total",
        )
    if ledger.num_free not in (None, len(ledger.free)):
        counted = f"the cache counts {ledger.num_free} free blocks"
        problem = f"layer {layer}: {counted}, and has {len(ledger.free)}"
        return Finding(problem, kind="count of free blocks")
    return None


def _describe_holders(location: Location) -> str:
    """Describe the sequences that have a block in their tables; empty if none has."""
    every = ", ".join(map(str, location.holders))
    return f" (sequence{'s' * (len(location.holders) > 1)} {every})" if every else ""


def _wrong_sharing(observation: Observation, layer: int) -> Finding | None:
    """Find sequences that share a block but no page of the oracle, or the other way round.

    Two pages with equal tokens and equal prefixes may also be one block if the cache shares by
    prefix.
    """
    by_prefix = observation.declared.prefixes.shares == "equal prefixes"
    tables = observation.after.tables_of(layer)
    block_of: dict[int, int] = {}
    page_of: dict[int, Page] = {}
    for seq, pages in observation.oracle.sequences.items():
        table = tables[seq]
        if finding := wrong_length(observation, seq, layer):
            return finding
        for at, (block, page) in enumerate(zip(table, pages, strict=False)):
            if block is None or at < observation.oracle.count_out_of_window(seq, layer):
                continue
            if block_of.setdefault(id(page), block) != block:
                return Finding(
                    f"layer {layer}: sequence {seq} has block {block} of its own where it "
                    f"shares block {block_of[id(page)]}: a block was copied needlessly",
                    Location(layer, {seq: at}, block),
                    kind="copied needlessly",
                )
            other = page_of.setdefault(block, page)
            if other is not page and not (by_prefix and other.tokens == page.tokens):
                return Finding(
                    f"layer {layer}: block {block} of sequence {seq} is shared with a "
                    "sequence that must have one of its own by now",
                    location_of_block(observation, layer, block),
                    kind="shared wrongly",
                )
    return None


def wrong_length(observation: Observation, seq: int, layer: int) -> Finding | None:
    """Find a table with more or fewer blocks than its sequence may have."""
    table, pages = observation.after.tables_of(layer)[seq], observation.oracle.sequences[seq]
    lookahead = observation.declared.lookahead_blocks
    if len(pages) <= len(table) <= len(pages) + lookahead:
        return None
    more = f" to {len(pages) + lookahead}" if lookahead else ""
    return Finding(
        f"layer {layer}: sequence {seq} has {len(table)} blocks for "
        f"{observation.oracle.length(seq)} tokens; {len(pages)}{more} are right",
        Location(layer, {seq: None}),
        kind="length of a table",
    )


# Look-ahead blocks


@dataclass(slots=True)
class Lookahead(State):
    """Blocks at the ends of tables that hold no token yet."""

    enabled_by: ClassVar = "lookahead_blocks"
    uncertain_room: ClassVar = True
    spared_blocks: ClassVar = "look-ahead blocks"

    max_blocks: int = 0
    """Value of ``BlockTableMethods.lookahead_blocks``."""
    held: dict[int, int] = field(default_factory=dict)
    """Number of such blocks that each sequence has, in the layer where it has most."""

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> Lookahead:  # noqa: ARG003
        return cls(adapter.lookahead_blocks)

    def on_release(self, seq: int) -> None:
        self.held.pop(seq, None)

    def blocks_to_spare(self, seqs: Collection[int]) -> int:
        return sum(self.held.values()) + self.max_blocks * len(seqs)


@invariant(rank=21, needs=("ledger", "table"))
def lookahead(observation: Observation) -> Finding | None:
    """Look-ahead blocks must belong to one sequence alone."""
    if not observation.declared.lookahead_blocks:
        return None
    for layer in range(observation.spec.num_layers):
        owners = observation.after.owners(layer)
        for seq, pages in observation.oracle.sequences.items():
            for block in observation.after.tables_of(layer)[seq][len(pages) :]:
                if block is None or owners[block] == 1:
                    continue
                location = location_of_block(observation, layer, block)
                problem = f"is a look-ahead block of sequence {seq}{_describe_holders(location)}"
                return Finding(f"layer {layer}: block {block} is shared, and {problem}", location)
    return None


class LookaheadBlocks(Observer):
    """Observer that records in the oracle which look-ahead blocks a cache took."""

    any_of = ("table",)

    def after(self, observation: Observation) -> Mapping[str, int]:
        if state := observation.oracle.state(Lookahead):
            pages = observation.oracle.sequences
            tables = [
                observation.after.tables_of(layer) for layer in range(observation.spec.num_layers)
            ]
            state.held = {
                seq: max(len(each[seq]) for each in tables) - len(pages[seq]) for seq in pages
            }
        return {}


def refuse_lookahead(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for look-ahead blocks that cannot be judged."""
    name, blocks = f"{adapter.__name__}.lookahead_blocks", adapter.lookahead_blocks
    if type(blocks) is not int or blocks < 0:
        raise TypeError(f"{name} is {blocks!r}: write a number of blocks, 0 for none")
    if not blocks:
        return
    if lacking := {"table", "ledger"} - adapter.abilities:
        raise TypeError(f"{name} is {blocks}: define {' and '.join(sorted(lacking))} too")
    if not adapter.atomic_batches or adapter.windows.groups:
        other = "windows" if adapter.windows.groups else "atomic_batches = False"
        raise TypeError(
            f"{name} is {blocks}, which cannot be judged with {other} yet: leave out one of them"
        )


@invariant(rank=32)
def refusals(observation: Observation) -> Finding | None:
    """A refused step must leave tables and ledgers as they were.

    Not judged where a cache admits row by row and some rows were admitted, or where the refused row
    may have freed blocks outside its windows: other invariants compare tables and ledgers with the
    oracle there.
    """
    if (
        observation.outcome.fits
        or observation.outcome.written
        or observation.after.tables_and_ledgers() == observation.before.tables_and_ledgers()
    ):
        return None
    if observation.spec.windows and observation.declared.windows.frees == NEXT_TRY:
        return None
    return Finding("a step that found no room changed the books")


BLOCK_TABLE_METHODS = frozenset({"table", "ledger", "container"})
"""Methods that show a part of the bookkeeping."""


def read_block_tables(adapter: Any, oracle: Oracle, num_layers: int) -> dict[str, Any]:
    """Copy the tables, ledgers and containers of a cache or rank, as fields of a snapshot."""
    can, layers, shown = adapter.abilities, range(num_layers), dict[str, Any]()
    ended = oracle.ended
    if "table" in can:
        shown["tables"] = {
            (seq, layer): call_or_error(_table, adapter, seq, layer)
            for layer in layers
            for seq in oracle.sequences
            if seq not in ended
        }
    if "ledger" in can:
        shown["ledgers"] = [call_or_error(_copy_ledger, adapter, layer) for layer in layers]
    if "container" in can:
        shown["containers"] = {
            seq: call_or_error(adapter.container, seq) for seq in oracle.readable
        }
    return shown


def _table(adapter: Any, seq: int, layer: int) -> list[int | None]:
    return return_values.table(f"table({seq}, {layer})", adapter.table(seq, layer))


def _copy_ledger(adapter: Any, layer: int) -> Ledger:
    ledger = return_values.ledger(f"ledger({layer})", adapter.ledger(layer))
    return replace(
        ledger,
        refcounts=dict(ledger.refcounts),
        free=list(ledger.free),
        cached=set(ledger.cached),
    )


class _FreeCounts(NamedTuple):
    layer: int
    by_oracle: int
    by_ledger: int

    @property
    def differ(self) -> bool:
        return self.by_oracle != self.by_ledger


class FreeBlocks(Observer):
    """Free blocks by the oracle and by the ledger, and the step since which they differ.

    A wrong refusal is usually caused by an earlier step.
    """

    any_of = ("ledger",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._counts: list[_FreeCounts] = []
        self._since: int | None = None
        self._has_own_count = False
        """True if the ledgers show the cache's own count, which is compared after each step."""

    def before(self, step: Operation) -> Mapping[str, int]:  # noqa: ARG002
        oracle = self.run.oracle
        spared = oracle.blocks_to_spare()
        self._counts = [
            _FreeCounts(layer, oracle.free_in(layer) - spared, len(ledger.free))
            for layer, ledger in enumerate(self.run.snapshot.ledgers)
            if isinstance(ledger, Ledger)
        ]
        self._has_own_count = any(
            isinstance(ledger, Ledger) and ledger.num_free is not None
            for ledger in self.run.snapshot.ledgers
        )
        if not any(each.differ for each in self._counts):
            self._since = None
        elif self._since is None:
            self._since = len(self.run.completed_steps)
        return {}

    def explain_refusal(self) -> str:
        """Describe both counts of the first layer where they differ; empty without ledgers.

        If they agree, the cache may count its room wrongly: its count is compared where shown.
        """
        if not self._counts:
            return ""
        layer, *both = max(self._counts, key=lambda each: each.differ)
        counts = "; layer {}: {} free by the oracle, {} by the ledger".format(layer, *both)
        if self._since is not None:
            return f"{counts}, which differ since step {self._since}"
        own = (
            "" if self._has_own_count else "; the cache's own count is not shown (Ledger.num_free)"
        )
        return counts + own


def _show_books(run: Run, look: SnapshotScope) -> Mapping[str, Any]:  # noqa: ARG001
    with run.cache_under_test.device.torch_context():
        return read_block_tables(run.adapter, run.oracle, run.spec.num_layers)


BLOCK_TABLES = Capability(
    methods=BlockTableMethods,
    sharded={"table": RankPolicy.FIRST, "ledger": RankPolicy.FIRST},
    views=(View(BLOCK_TABLE_METHODS, _show_books, in_pictures=True),),
    needs={"ledger": ("table",)},
    invariants=(
        ownership,
        lookahead,
        refusals,
    ),
    states=(Lookahead,),
    refuse=(refuse_lookahead,),
    observers=(FreeBlocks, LookaheadBlocks),
)
