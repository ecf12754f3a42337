"""Blocks that a cache keeps for later texts: their contents, and the eviction order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities.cache_data import PREFIX_HIT_METHODS
from pytest_roseinfer.capabilities.capability import Observer, Run
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Observation,
    invariant,
    location_of_block,
)
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.pages import Page, Table

# Contents of blocks


BlockTokens = Mapping[int, Sequence[int]]
"""Tokens in each block that is held, or free and kept for later texts."""


def read_block_tokens(
    oracle: Oracle,
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    before: BlockTokens,
    shown: Mapping[int, Table],
) -> BlockTokens:
    """Return the tokens of blocks after a step; a cached block keeps those from ``before``.

    A long write may move a page out of a window at once, and the cache may keep it in a block that
    no table in ``tables`` had, or had with fewer tokens. Such pages are kept under block numbers
    below 0, as long as any block is cached.
    """
    contents = {block: before[block] for block in cached if block in before}
    hidden = oracle.hidden
    passed = {tuple(before[block]) for block in before if block < 0}
    for seq, blocks in tables.items():
        # In a shared block, tokens that a truncation cut off stay until the sequence writes there.
        stored = oracle.length(seq) + oracle.truncated_on_last[seq] - oracle.unwritten(seq)
        for at, (block, page) in enumerate(zip(blocks, oracle.sequences[seq], strict=False)):
            if block is None:
                if _left_window_unshown(shown.get(seq, ()), at, cached, before, page):
                    passed.add(tuple(page.tokens))
                continue
            written = tuple(page.tokens[: max(0, stored - at * oracle.block_size)])
            known_contents = before.get(block, ())
            if seq in hidden and known_contents == tuple(page.tokens):
                written = known_contents  # reused from the cache, so it need not be copied back
            contents[block] = max(contents.get(block, ()), written, key=len)
    if cached:
        contents |= {-1 - at: page for at, page in enumerate(sorted(passed))}
    return contents


def _left_window_unshown(
    table: Table, at: int, cached: Collection[int], before: BlockTokens, page: Page
) -> bool:
    """Return True if no table showed a block with the whole page before it was freed."""
    if at >= len(table):
        return True
    block = table[at]
    return block is not None and block in cached and before.get(block) != tuple(page.tokens)


# Eviction order


@dataclass(frozen=True, slots=True)
class ReleasedBlock:
    """A block without a holder whose content is kept for later lookups."""

    step: int
    """Step of its release by the last holder."""
    at: int
    """Index in the tables of its last holders; 0 for the first block of a sequence."""
    holders: frozenset[int] = frozenset()
    tokens: tuple[int, ...] = ()

    def evicts_before(self, other: ReleasedBlock) -> bool:
        """Return True if it must be evicted first: released earlier, or nearer to the end."""
        if self.step != other.step:
            return self.step < other.step
        return self.at > other.at and bool(self.holders & other.holders)


def update_released_blocks(
    earlier: Mapping[int, ReleasedBlock],
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    contents: BlockTokens,
    step: int,
) -> dict[int, ReleasedBlock]:
    """Return the ``cached`` blocks after a step; those not in ``earlier`` were released in it.

    The tables and contents are those from before the step.
    """
    released: dict[int, ReleasedBlock] = {}
    for block in cached:
        if block in earlier:
            released[block] = earlier[block]
            continue
        at = {seq: table.index(block) for seq, table in tables.items() if block in table}
        tokens = tuple(contents.get(block, ()))
        released[block] = ReleasedBlock(step, max(at.values(), default=0), frozenset(at), tokens)
    return released


@invariant(rank=30, needs=("use_tokens", "table", "ledger"))
def evictions(observation: Observation) -> Finding | None:
    """Cached blocks must be evicted in the order that the cache declares."""
    if observation.declared.prefixes.evicts == "any":
        return None
    evicted_blocks, staying = _split_released(observation)
    for block, evicted in evicted_blocks.items():
        for other, stays in staying.items():
            if stays.evicts_before(evicted):
                return Finding(
                    f"block {block} was evicted and block {other} was not, which "
                    + _order_reason(stays, evicted),
                    location_of_block(observation, 0, block),
                )
    return None


@invariant(rank=30, needs=("use_tokens", "table", "ledger"))
def needless_evictions(observation: Observation) -> Finding | None:
    """A step must evict no cached block without need, if the cache declares so.

    A write needs none while other blocks are free, and a step that is refused needs none at all.
    """
    if observation.declared.prefixes.evicts_when != "needed":
        return None
    note = cached_blocks_note(observation)
    if not (observation.outcome.fits or observation.outcome.written):
        reason = "by a step that was refused, which must change nothing"
    elif note.needed is None or note.needed > note.spare:
        return None
    else:
        reason = (
            f"though the write needs {format_count(note.needed, 'block')} at most, and "
            f"{note.spare} that are not cached were free"
        )
    evicted_blocks, _ = _split_released(observation)
    if not evicted_blocks:
        return None
    block = min(evicted_blocks)
    return Finding(f"block {block} was evicted, {reason}", location_of_block(observation, 0, block))


def _split_released(
    observation: Observation,
) -> tuple[dict[int, ReleasedBlock], dict[int, ReleasedBlock]]:
    """Split the released blocks into those that a step evicted and those still cached."""
    cached = observation.after.ledger(0).cached
    evicted, staying = dict[int, ReleasedBlock](), dict[int, ReleasedBlock]()
    for block, each in cached_blocks_note(observation).released.items():
        if block in cached:
            staying[block] = each
        elif not _still_there(observation, each):
            evicted[block] = each
    return evicted, staying


def _count_choices(observation: Observation) -> int:
    """Count the evictions in which another cached block could have been evicted."""
    evicted_blocks, staying = _split_released(observation)
    return sum(
        any(evicted.evicts_before(stays) for stays in staying.values())
        for evicted in evicted_blocks.values()
    )


def _still_there(observation: Observation, was: ReleasedBlock) -> bool:
    """Return True if a sequence now holds the block's tokens, in that block or another.

    If it stored them again, the cache dropped a duplicate, which is not an eviction.
    """
    return any(
        tuple(page.tokens[: len(was.tokens)]) == was.tokens
        for seq, table in observation.after.tables_of(0).items()
        for page, _ in zip(observation.oracle.sequences[seq], table, strict=False)
    )


def _order_reason(cached: ReleasedBlock, evicted: ReleasedBlock) -> str:
    if cached.step != evicted.step:
        return f"was released earlier, in step {cached.step} and not in step {evicted.step}"
    return (
        f"was released with it and is nearer to the end: index {cached.at} comes after {evicted.at}"
    )


@dataclass(frozen=True, slots=True)
class CachedBlocksNote:
    """Knowledge of cached blocks that invariants need to judge a step."""

    contents: Mapping[int, BlockTokens] = field(default_factory=dict)
    """Tokens of blocks after the step, by the first layer of each group that shares its blocks;
    empty where the snapshot has no lookups."""
    released: Mapping[int, ReleasedBlock] = field(default_factory=dict)
    """Blocks kept for later texts before the step; empty if evictions are not judged."""
    needed: int | None = None
    """Most blocks that the step needs; None if it may evict blocks that it does not need."""
    spare: int = 0
    """Blocks that were free and not cached before the step."""


def cached_blocks_note(observation: Observation) -> CachedBlocksNote:
    """Return the note of the observer ``CachedBlocks``; an empty one without it."""
    note: CachedBlocksNote = observation.notes.get(CachedBlocks) or CachedBlocksNote()
    return note


class CachedBlocks(Observer):
    """Contents of blocks, and which of them are kept for later texts."""

    any_of = ("match_prefix", "prefixes.evicts=least recent")
    conditions: ClassVar = {
        "prefix_hit": "A sequence begins with the content of a full block that was stored before, "
        'and some lookup has found tokens. Required of a cache that shares ``"equal prefixes"`` '
        "and defines ``match_prefix`` and ``prefill``.",
        "eviction_choice": "A cached block is evicted, and another one stays that was released "
        "later, so that the order decided; counted for each such block. Required of a cache that "
        'evicts the ``"least recent"`` one and defines ``prefill`` and ``free``.',
    }

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.oracle = run.oracle
        self.contents: dict[int, BlockTokens] = {}
        """Tokens of blocks after the latest step, by the first layer of each group."""
        self.tables: dict[int, Mapping[int, Table]] = {}
        """Tables after the latest step, by the first layer of each group."""
        self.has_lookup_hits = False
        """True once a lookup has found tokens."""
        self.released: Mapping[int, ReleasedBlock] = {}
        """Blocks kept for later texts after the latest step."""
        self.longest = 0
        """Most tokens that a sequence had before the present step."""
        self._needed: int | None = None
        """Most blocks that the present step needs; None if it may evict others."""
        self._spare = 0
        """Blocks that were free and not cached before the present step."""

    def before(self, step: Operation) -> Mapping[str, int]:
        lengths = map(self.oracle.length, self.oracle.sequences)
        self.longest = max([self.longest, *lengths])
        self._needed = None
        if self._judges_need and (rows := step.rows()):
            lookahead_blocks = self.run.declared.lookahead_blocks * len(rows)
            self._needed = self.oracle.pages_needed(rows) + lookahead_blocks
            ledger = self.run.snapshot.ledger(0)
            self._spare = len({*ledger.free} - {*ledger.cached})
        return {}

    @property
    def _judges_need(self) -> bool:
        return bool(self.run.declared.prefixes.evicts_when == "needed")

    @property
    def _judges_order(self) -> bool:
        return bool(self.run.declared.prefixes.evicts != "any")

    def after(self, observation: Observation) -> Mapping[str, int]:
        written, hits = observation.outcome.written, 0
        if written and self.run.features >= PREFIX_HIT_METHODS:
            hits = self._count_prefix_hits(observation.after, written.rows)
        choices = _count_choices(observation) if self._judges_order else 0
        self._note(observation.before, observation.after)
        return {"prefix_hit": hits, "eviction_choice": choices}

    def notes(self, after: Snapshot) -> CachedBlocksNote:
        return CachedBlocksNote(
            self.block_tokens_after(after) if after.matches else {},
            self.released,
            self._needed,
            self._spare,
        )

    def _note(self, before: Snapshot, after: Snapshot) -> None:
        self.has_lookup_hits |= any(
            isinstance(count, int) and count > 0 for count in after.matches.values()
        )
        if self._judges_order or self._judges_need:
            self.released = update_released_blocks(
                self.released,
                before.tables_of(0),
                after.ledger(0).cached,
                self.contents.get(0, {}),
                len(self.run.completed_steps),
            )
        self.contents = self.block_tokens_after(after)
        for layer in self.oracle.windows.groups:
            self.tables[layer] = after.tables_of(layer)

    def _count_prefix_hits(self, after: Snapshot, rows: Sequence[tuple[int, int]]) -> int:
        """Count the sequences that began in this step with the content of a full block.

        The block may have been written again with equal tokens, so a lookup must have found some.
        """
        new_seqs = [seq for seq, count in rows if count == self.oracle.length(seq)]
        return sum(self.has_lookup_hits and self._has_prefix_hit(after, seq) for seq in new_seqs)

    def _has_prefix_hit(self, after: Snapshot, seq: int) -> bool:
        """Return True if one of the sequence's full blocks held these tokens before the step."""
        pages = [tuple(page.tokens) for page in self.oracle.sequences[seq]]
        return any(
            len(page) == self.oracle.block_size
            and block is not None
            and self.contents.get(layer, {}).get(block) == page
            for layer in self.oracle.windows.groups
            for page, block in zip(pages, after.tables_of(layer)[seq], strict=False)
        )

    def block_tokens_after(self, after: Snapshot) -> dict[int, BlockTokens]:
        """Return the tokens of blocks after the present step, by the first layer of each group."""
        contents: dict[int, BlockTokens] = {}
        if not {"table", "ledger"} <= self.run.features:
            return contents
        for layer in self.oracle.windows.groups:
            tables, before = after.tables_of(layer), self.contents.get(layer, {})
            # A block that now belongs to another group is no longer kept for this one.
            others = after.owners(*self.oracle.pool_of(layer)[1:]) if before else {}
            cached = {*after.ledger(layer).cached} - {*others}
            if after.blocks_in_flight:
                cached |= after.blocks_of_stores - after.owners(layer).keys()
                under_loads = after.blocks_in_flight.keys() - after.blocks_of_stores
                before = {each: before[each] for each in before.keys() - under_loads}
            contents[layer] = read_block_tokens(
                self.oracle, tables, cached, before, self.tables.get(layer, {})
            )
        return contents
