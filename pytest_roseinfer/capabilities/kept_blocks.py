"""The blocks that a cache keeps for later texts: what they hold, and the order of evictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities.cache_data import FINDS_PREFIXES
from pytest_roseinfer.capabilities.capability import Observer, Run
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Observation,
    invariant,
    location_of_block,
)

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Page, Table

# What the blocks of a cache hold, as far as the tokens are known that were written there.


Contents = Mapping[int, Sequence[int]]
"""The tokens in each block that is held, or free and kept for texts that come."""


def contents_of(
    oracle: Oracle,
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    before: Contents,
    shown: Mapping[int, Table],
) -> Contents:
    """Return what blocks hold after a step; a cached one holds what it held ``before``.

    What a long write moved out of a window at once may be kept in a block that no table ``shown``
    before had, or had with less in it: it counts as held, by blocks below 0, as long as any block
    is kept.
    """
    found = {block: before[block] for block in cached if block in before}
    hidden = oracle.hidden
    passed = {tuple(before[block]) for block in before if block < 0}
    for seq, blocks in tables.items():
        # Of a block that others held too, what a sequence does not see stays until it writes there.
        due = oracle.length(seq) + oracle.unseen[seq] - oracle.unwritten(seq)
        for at, (block, page) in enumerate(zip(blocks, oracle.sequences[seq], strict=False)):
            if block is None:
                if _moved_out_unseen(shown.get(seq, ()), at, cached, before, page):
                    passed.add(tuple(page.tokens))
                continue
            written = tuple(page.tokens[: max(0, due - at * oracle.block_size)])
            held = before.get(block, ())
            if seq in hidden and held == tuple(page.tokens):
                written = held  # it was found, and need not be copied back
            found[block] = max(found.get(block, ()), written, key=len)
    if cached:
        found |= {-1 - at: page for at, page in enumerate(sorted(passed))}
    return found


def _moved_out_unseen(
    table: Table, at: int, cached: Collection[int], before: Contents, page: Page
) -> bool:
    """Return True if no table showed a block with all of a page before it was given back."""
    if at >= len(table):
        return True
    block = table[at]
    return block is not None and block in cached and before.get(block) != tuple(page.tokens)


# When the blocks that a cache keeps for later texts were released, and what they hold.


@dataclass(frozen=True, slots=True)
class Released:
    """A block that nobody holds any more, and that a text may find."""

    step: int
    """The step in which its last holder let go of it."""
    at: int
    """Which block of its last holders it was; the head of a sequence is 0."""
    holders: frozenset[int] = frozenset()
    tokens: tuple[int, ...] = ()

    def goes_before(self, other: Released) -> bool:
        """Return True if it must be evicted first: released earlier, or nearer to the tail."""
        if self.step != other.step:
            return self.step < other.step
        return self.at > other.at and bool(self.holders & other.holders)


def released_of(
    earlier: Mapping[int, Released],
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    contents: Contents,
    step: int,
) -> dict[int, Released]:
    """Return what is ``cached`` after a step; what was not ``earlier`` was released in it.

    The tables and contents are those from before the step.
    """
    found: dict[int, Released] = {}
    for block in cached:
        if block in earlier:
            found[block] = earlier[block]
            continue
        at = {seq: table.index(block) for seq, table in tables.items() if block in table}
        tokens = tuple(contents.get(block, ()))
        found[block] = Released(step, max(at.values(), default=0), frozenset(at), tokens)
    return found


@invariant(rank=30, needs=("use_tokens", "table", "ledger"))
def evictions(seen: Observation) -> Finding | None:
    """Cached blocks must be evicted in the order that the cache declares."""
    if seen.declared.prefixes.evicts == "any":
        return None
    kept = seen.after.ledger(0).cached
    staying = {block: each for block, each in note_of(seen).released.items() if block in kept}
    for block, gone in note_of(seen).released.items():
        if block in kept or _still_there(seen, gone):
            continue
        for other, stays in staying.items():
            if stays.goes_before(gone):
                return Finding(
                    f"block {block} was evicted and block {other} was not, which "
                    + _why(stays, gone),
                    location_of_block(seen, 0, block),
                )
    return None


def _still_there(seen: Observation, was: Released) -> bool:
    """Return True if a sequence has by now, in that block or another, what the block held.

    Where it stored that anew, the block is one too many and not evicted.
    """
    return any(
        tuple(page.tokens[: len(was.tokens)]) == was.tokens
        for seq, table in seen.after.tables_of(0).items()
        for page, _ in zip(seen.oracle.sequences[seq], table, strict=False)
    )


def _why(stays: Released, gone: Released) -> str:
    if stays.step != gone.step:
        return f"was released earlier, in step {stays.step} and not in step {gone.step}"
    return f"was released with it and lies nearer to the tail: {stays.at} is behind {gone.at}"


@dataclass(frozen=True, slots=True)
class KeptNote:
    """What is known of kept blocks when invariants judge a step."""

    contents: Mapping[int, Contents] = field(default_factory=dict)
    """What blocks hold after the step, by a layer of each group of them that has the same blocks;
    known where lookups are asked for."""
    released: Mapping[int, Released] = field(default_factory=dict)
    """The blocks that were kept for later texts before the step, where their order is declared."""


def note_of(seen: Observation) -> KeptNote:
    note: KeptNote = seen.notes.get(KeptTexts) or KeptNote()
    return note


class KeptTexts(Observer):
    """Knows what blocks hold, and what of that is kept for texts that come."""

    any_of = ("match_prefix", "prefixes.evicts=least recent")
    conditions: ClassVar = {
        "prefix_hit": "A sequence begins with what a full block held before, and lookups find "
        'something. Required of a cache that shares ``"equal prefixes"`` and defines '
        "``match_prefix`` and ``prefill``."
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.oracle = run.oracle
        self.contents: dict[int, Contents] = {}
        """What blocks held after the latest step, by a layer of each group."""
        self.shown: dict[int, Mapping[int, Table]] = {}
        """The tables then, alike."""
        self.finds = False
        """A lookup has found something."""
        self.released: Mapping[int, Released] = {}
        """What was kept for later texts then."""

    def after(self, seen: Observation) -> Mapping[str, int]:
        written, found = seen.outcome.written, 0
        if written and self.run.can >= FINDS_PREFIXES:
            found = self._begun_with_found(seen.after, written.rows)
        self._note(seen.before, seen.after)
        return {"prefix_hit": found}

    def notes(self, after: Snapshot) -> KeptNote:
        return KeptNote(self.contents_after(after) if after.matches else {}, self.released)

    def _note(self, before: Snapshot, after: Snapshot) -> None:
        self.finds |= any(isinstance(found, int) and found > 0 for found in after.matches.values())
        if self.run.declared.prefixes.evicts != "any":
            kept, step = (before.tables_of(0), after.ledger(0).cached), len(self.run.done)
            self.released = released_of(self.released, *kept, self.contents.get(0, {}), step)
        self.contents = self.contents_after(after)
        for layer in self.oracle.windows.groups:
            self.shown[layer] = after.tables_of(layer)

    def _begun_with_found(self, after: Snapshot, rows: Sequence[tuple[int, int]]) -> int:
        """Count the sequences that began in this step with what a full block held before.

        A block may have been written anew with the same, so a lookup must have found something.
        """
        begun = [seq for seq, count in rows if count == self.oracle.length(seq)]
        return sum(self.finds and self._had(after, seq) for seq in begun)

    def _had(self, after: Snapshot, seq: int) -> bool:
        """Return True if a full block held before what the sequence has there now."""
        pages = [tuple(page.tokens) for page in self.oracle.sequences[seq]]
        return any(
            len(page) == self.oracle.block_size
            and block is not None
            and self.contents.get(layer, {}).get(block) == page
            for layer in self.oracle.windows.groups
            for page, block in zip(pages, after.tables_of(layer)[seq], strict=False)
        )

    def contents_after(self, after: Snapshot) -> dict[int, Contents]:
        found: dict[int, Contents] = {}
        for layer in self.oracle.windows.groups:
            tables, before = after.tables_of(layer), self.contents.get(layer, {})
            # A block that another group has got by now is no longer kept for this one.
            others = after.owners(*self.oracle.pool_of(layer)[1:]) if before else {}
            cached = {*after.ledger(layer).cached} - {*others}
            found[layer] = contents_of(
                self.oracle, tables, cached, before, self.shown.get(layer, {})
            )
        return found
