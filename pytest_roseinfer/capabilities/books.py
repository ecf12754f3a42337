"""The books of a cache: tables, refcounts, free blocks, and the slots of sequences."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.cache_data import Ledger
from pytest_roseinfer.capabilities.capability import (
    Across,
    Capability,
    Look,
    Observer,
    Run,
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
from pytest_roseinfer.capabilities.operation import asked
from pytest_roseinfer.oracle.pages import NEXT_TRY
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Page


class BookMethods:
    """The methods by which a cache shows its books."""

    @optional
    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        """Return the blocks of a sequence, as indices into ``arena``'s block dimension.

        None stands for a block that was given back since it left the layer's window.
        """

    @optional
    def ledger(self, layer: int) -> Ledger:
        """Return the cache's own books for one layer. With them, histories run out of room too."""


@invariant(rank=20, needs=("ledger", "table"))
def ownership(seen: Observation) -> Finding | None:
    """Tables, refcounts and free blocks must agree with each other and with the oracle."""
    for layer in range(seen.spec.num_layers):
        if found := _wrong_books(seen, layer) or _wrong_sharing(seen, layer):
            return found
    return None


def _wrong_books(seen: Observation, layer: int) -> Finding | None:
    """Say where refcounts or free blocks disagree with the tables, or with the cache's count."""
    owners = seen.after.owners(*seen.oracle.pool_of(layer))
    ledger = seen.after.ledger(layer)
    held = {block: count for block, count in ledger.refcounts.items() if count}
    if held != dict(owners):
        first = min(block for block, _ in held.items() ^ owners.items())
        where = location_of_block(seen, layer, first)
        times = some(owners[first], "time")
        counts = f"refcount {held.get(first, 0)}, and tables name it {times}{_by(where)}"
        return Finding(f"layer {layer}: block {first} has {counts}", where)
    if len(set(ledger.free)) < len(ledger.free):
        twice = max(ledger.free, key=list(ledger.free).count)
        what = f"layer {layer}: the free list names a block twice: {ledger.free}"
        return Finding(what, location_of_block(seen, layer, twice))
    if both := set(ledger.free) & set(owners):
        where = location_of_block(seen, layer, min(both))
        return Finding(f"layer {layer}: block {where.block} is free, and held{_by(where)}", where)
    if len(ledger.free) + len(owners) != ledger.total:
        return Finding(
            f"layer {layer}: {len(ledger.free)} free + {len(owners)} held blocks are not "
            f"the {ledger.total} there are"
        )
    if ledger.num_free not in (None, len(ledger.free)):
        counted = f"the cache counts {ledger.num_free} free blocks"
        return Finding(f"layer {layer}: {counted}, and has {len(ledger.free)}")
    return None


def _by(where: Location) -> str:
    """Say which sequences have a block in their tables, if any has."""
    every = ", ".join(map(str, where.holders))
    return f" (sequence{'s' * (len(where.holders) > 1)} {every})" if every else ""


def _wrong_sharing(seen: Observation, layer: int) -> Finding | None:
    """Say where sequences share a block but no page of the oracle, or the other way round.

    Pages that hold the same, in sequences that are equal up to there, may be one block too if the
    cache shares by prefix.
    """
    by_prefix = seen.declared.prefixes.shares == "equal prefixes"
    tables = seen.after.tables_of(layer)
    block_of: dict[int, int] = {}
    page_of: dict[int, Page] = {}
    for seq, pages in seen.oracle.sequences.items():
        table = tables[seq]
        if found := wrong_length(seen, seq, layer):
            return found
        for at, (block, page) in enumerate(zip(table, pages, strict=True)):
            if block is None or at < seen.oracle.given_back(seq, layer):
                continue
            if block_of.setdefault(id(page), block) != block:
                return Finding(
                    f"layer {layer}: sequence {seq} has block {block} of its own where it "
                    f"shares block {block_of[id(page)]}: a block was copied needlessly",
                    Location(layer, {seq: at}, block),
                )
            other = page_of.setdefault(block, page)
            if other is not page and not (by_prefix and other.tokens == page.tokens):
                return Finding(
                    f"layer {layer}: block {block} of sequence {seq} is shared with a "
                    "sequence that must have one of its own by now",
                    location_of_block(seen, layer, block),
                )
    return None


def wrong_length(seen: Observation, seq: int, layer: int) -> Finding | None:
    """Say where a table has more or fewer blocks than the tokens of its sequence need."""
    table, pages = seen.after.tables_of(layer)[seq], seen.oracle.sequences[seq]
    if len(table) == len(pages):
        return None
    return Finding(
        f"layer {layer}: sequence {seq} has {len(table)} blocks for "
        f"{seen.oracle.length(seq)} tokens; {len(pages)} are right",
        Location(layer, {seq: None}),
    )


@invariant(rank=32)
def refusals(seen: Observation) -> Finding | None:
    """A refused step must leave the books as they were.

    Where a cache admits row by row, and rows were admitted, or one gave back what left its windows
    before it found no room, other invariants compare the books with what the oracle says of them.
    """
    if seen.outcome.fits or seen.outcome.written or seen.after.books() == seen.before.books():
        return None
    if seen.spec.windows and seen.declared.windows.gives_back == NEXT_TRY:
        return None
    return Finding("a step that found no room changed the books")


BOOK_METHODS = frozenset({"table", "ledger", "container"})
"""The methods that show a part of them."""


def books_of(adapter: Any, oracle: Oracle, num_layers: int) -> dict[str, Any]:
    """Ask a cache, or one of its ranks, for its books; return a copy as fields of a snapshot."""
    can, layers, shown = adapter.abilities, range(num_layers), dict[str, Any]()
    if "table" in can:
        shown["tables"] = {
            (seq, layer): asked(_table, adapter, seq, layer)
            for layer in layers
            for seq in oracle.sequences
        }
    if "ledger" in can:
        shown["ledgers"] = [asked(_copied, adapter, layer) for layer in layers]
    if "container" in can:
        shown["kept"] = {seq: asked(adapter.container, seq) for seq in oracle.readable}
    return shown


def _table(adapter: Any, seq: int, layer: int) -> list[int | None]:
    return answers.table(f"table({seq}, {layer})", adapter.table(seq, layer))


def _copied(adapter: Any, layer: int) -> Ledger:
    shown = answers.ledger(f"ledger({layer})", adapter.ledger(layer))
    return replace(
        shown,
        refcounts=dict(shown.refcounts),
        free=list(shown.free),
        cached=set(shown.cached),
    )


class _Free(NamedTuple):
    layer: int
    by_oracle: int
    by_ledger: int

    @property
    def differ(self) -> bool:
        return self.by_oracle != self.by_ledger


class FreeBlocks(Observer):
    """Knows how many blocks are free by the oracle and by the books, and since when these differ.

    What a step is refused for began before it.
    """

    any_of = ("ledger",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._counts: list[_Free] = []
        self._since: int | None = None

    def before(self, step: Operation) -> Mapping[str, int]:  # noqa: ARG002
        self._counts = [
            _Free(layer, self.run.oracle.free_in(layer), len(ledger.free))
            for layer, ledger in enumerate(self.run.now.ledgers)
            if isinstance(ledger, Ledger)
        ]
        if not any(each.differ for each in self._counts):
            self._since = None
        elif self._since is None:
            self._since = len(self.run.done)
        return {}

    def about_refusals(self) -> str:
        """Say both numbers of the first layer in which they differ; nothing if none is shown."""
        if not self._counts:
            return ""
        layer, *both = max(self._counts, key=lambda each: each.differ)
        since = "" if self._since is None else f", which differ since step {self._since}"
        return "; layer {}: {} free by the oracle, {} by the ledger".format(layer, *both) + since


def _show_books(run: Run, look: Look) -> Mapping[str, Any]:  # noqa: ARG001
    with run.driven.device.working():
        return books_of(run.adapter, run.oracle, run.spec.num_layers)


BOOKS = Capability(
    methods=BookMethods,
    sharded={"table": Across.FIRST, "ledger": Across.FIRST},
    views=(View(BOOK_METHODS, _show_books, in_pictures=True),),
    needs={"ledger": ("table",)},
    invariants=(
        ownership,
        refusals,
    ),
    observers=(FreeBlocks,),
)
