"""The prefix cache: keeps blocks of sequences, ended ones too, and finds them by their tokens.

Its entries form a tree. Each entry is one block (one in each group of layers) below the entry of
the previous block, so the path from the root is the whole prefix that its keys and values depend
on. The cache holds a reference to every block, so a sequence that appends to one writes into a
copy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.kv.pool import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import CachedSequence


def chain_hash(before: int, link: int | tuple[int, ...]) -> int:
    """Return the hash of a prefix extended by a token or a block of tokens."""
    return hash((before, link))


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A cached block: a full one, or a tail, which is the partial last block of a sequence."""

    parent: PrefixEntry | None = field(repr=False)
    """Entry of the previous block; None in the root, which has no block of its own."""
    tokens: tuple[int, ...]
    hash: int
    end: int
    """Position after its last token."""
    block_ids: list[int]
    """Block id in each group of layers; ``SCRATCH`` where the block left a window and was freed."""
    num_holders: int = 0
    children: dict[PrefixEntry, None] = field(default_factory=dict, repr=False)
    """Child entries in order of insertion, so that equal histories free blocks in equal order."""
    cached: bool = True
    """False once it was removed: its holders keep it, and no lookup finds it again."""

    @property
    def key(self) -> tuple[int, int]:
        """The length and the hash; the length keeps tails and full blocks apart."""
        return len(self.tokens), self.hash

    def continues(self, parent: PrefixEntry, tokens: tuple[int, ...]) -> bool:
        """Return True if it really has these tokens after ``parent``, and not only their hash."""
        return self.parent is parent and self.tokens == tokens


def _new_root() -> PrefixEntry:
    return PrefixEntry(None, (), 0, 0, [])


class _OutOfWindowBlock(NamedTuple):
    """An entry's block in one group that only the cache holds, out of its holders' windows."""

    entry: PrefixEntry
    group: int


@dataclass(slots=True, eq=False)
class HeldPrefix:
    """The entries of the prefix cache that one sequence holds."""

    matched: list[PrefixEntry]
    """Full blocks that it began with, first to last."""
    tail: PrefixEntry | None
    """Partial block that it began with; None if it had none, or has written to a copy of it."""
    tip: PrefixEntry | None
    """Last full block of the sequence that is cached, whichever sequence inserted it: the parent
    of the next one. None after the end of the sequence."""
    inserted: list[PrefixEntry] = field(default_factory=list)
    """Blocks that it inserted itself, first to last."""
    completed: list[PrefixEntry] = field(default_factory=list)
    """Entries that lacked blocks of windowed layers and got them from this sequence."""


class PrefixCache:
    """A cache that shares the blocks of ``kv`` among prompts with equal prefixes.

    ``match`` is called when a sequence begins, ``insert`` when it has stored tokens, and
    ``release`` or ``release_and_invalidate`` at its end, before its blocks are freed.
    """

    def __init__(self, kv: KVBlockManager) -> None:
        self.kv = kv
        self.num_evictions = 0
        self._root = _new_root()
        self._entries: dict[tuple[int, int], PrefixEntry] = {}
        self._windowed = [at for at, group in enumerate(kv.groups) if group.window is not None]
        self._entry_of_block: dict[int, PrefixEntry] = {}
        """Entry of every block of a windowed group, by block id."""
        self.evictable_entries: OrderedDict[PrefixEntry, int] = OrderedDict()
        """Entries without holders, the least recently used first, with their time of last use as
        a count of uses. All can be evicted."""
        self._evictable_blocks: OrderedDict[_OutOfWindowBlock, int] = OrderedDict()
        """Blocks of held entries that left the windows of all holders, with the time of that, in
        the same order and count."""
        self._borrowed_blocks: set[int] = set()
        """Blocks that an entry got from a sequence which still holds them without the entry."""
        self._uses = 0
        self.num_evictable_blocks = 0
        """Number of blocks of every pool that eviction can free."""

    def match(self, tokens: Sequence[int]) -> tuple[HeldPrefix, list[list[int]], int]:
        """Find the longest cached prefix that leaves a token to compute, and hold it.

        This returns the held entries, their block lists and their number of tokens.
        """
        max_tokens = len(tokens) - 1
        matched = self._full_blocks(tokens, max_tokens)
        tail = self._match_partial_block(matched[-1] if matched else self._root, tokens, max_tokens)
        entries = self._longest_complete_prefix(matched if tail is None else [*matched, tail])
        if tail is not None and tail not in entries[-1:]:
            tail = None
        num_tokens = entries[-1].end if entries else 0
        begins = [0] * len(self.kv.groups)
        """Index of the first entry that gives the sequence a block, for each group."""
        for group in self._windowed:
            begins[group] = (
                self.kv.groups[group].first_visible_position(num_tokens) // self.kv.block_size
            )
        for at, entry in enumerate(entries):
            self._acquire(entry, [group for group, begin in enumerate(begins) if at >= begin])
        block_lists = [
            [SCRATCH] * begin + [entry.block_ids[group] for entry in entries[begin:]]
            for group, begin in enumerate(begins)
        ]
        matched = entries if tail is None else entries[:-1]
        return (
            HeldPrefix(matched, tail, matched[-1] if matched else self._root),
            block_lists,
            num_tokens,
        )

    def may_match(self, tokens: Sequence[int]) -> bool:
        """Return True if ``match`` may find something; hold nothing."""
        entries = self._full_blocks(tokens, min(len(tokens) - 1, self.kv.block_size))
        return (
            bool(entries)
            or self._match_partial_block(self._root, tokens, len(tokens) - 1) is not None
        )

    def insert(self, held_prefix: HeldPrefix, sequence: CachedSequence) -> None:
        """Add the blocks that a sequence has filled.

        If a block with the same tokens is cached already, that one stays, and this sequence's
        own is not cached.
        """
        # Tokens in flight are stored, but not known yet, so no block can have them in its key.
        stored = min(sequence.num_stored, len(sequence.token_ids))
        if held_prefix.tail is not None and stored > held_prefix.tail.end:
            self._release_entry(held_prefix.tail)
            held_prefix.tail = None
        size = self.kv.block_size
        computed_again = False
        while (
            held_prefix.tip is not None
            and held_prefix.tip.cached
            and held_prefix.tip.end + size <= stored
        ):
            tip = held_prefix.tip
            block = tuple(sequence.token_ids[tip.end : tip.end + size])
            hashed = chain_hash(tip.hash, block)
            entry = self._entries.get((size, hashed))
            if entry is None:
                entry = self._add(tip, block, hashed, sequence)
                entry.num_holders = 1
                held_prefix.inserted.append(entry)
            elif not entry.continues(tip, block):
                return  # two prefixes with one hash: the older entry stays
            else:
                self._fill_missing_blocks(entry, sequence, held_prefix)
                computed_again = True
            held_prefix.tip = entry
        if computed_again:
            self._renew_path(held_prefix.tip)

    def release(self, held_prefix: HeldPrefix, sequence: CachedSequence) -> None:
        """End a sequence, and keep its stored blocks, the partial one too.

        Its blocks must have no reserved positions, since another sequence may continue them.
        """
        self.insert(held_prefix, sequence)
        # If it still holds a tail, it has no partial block of its own.
        if held_prefix.tip is not None and held_prefix.tail is None:
            self._add_tail(held_prefix.tip, sequence)
        self._release_all(held_prefix)

    def release_and_invalidate(self, held_prefix: HeldPrefix) -> None:
        """End a sequence, and remove the subtrees of all entries that it inserted or completed."""
        for entry in (*held_prefix.inserted, *held_prefix.completed):
            if entry.cached:
                self._remove_subtree(entry)
        self._release_all(held_prefix)

    def evict(self, blocks_needed: int) -> int:
        """Free ``blocks_needed`` blocks of every pool, or all that can be, and return how many."""
        before = self.num_evictable_blocks
        while before - self.num_evictable_blocks < blocks_needed and (
            self.evictable_entries or self._evictable_blocks
        ):
            entry, used = next(iter(self.evictable_entries.items()), (None, self._uses + 1))
            loose_block, last_use = next(
                iter(self._evictable_blocks.items()), (None, self._uses + 1)
            )
            if entry is not None and used < last_use:
                self._remove_subtree(entry)  # has no children
            elif loose_block is not None:
                self._unmark_evictable_block(loose_block)
                self._free_entry_block(*loose_block)
            self.num_evictions += 1
        return before - self.num_evictable_blocks

    def clear(self) -> None:
        """Remove all entries. Blocks in use stay with their sequences."""
        for entry in list(self._root.children):
            self._remove_subtree(entry)

    def reset(self) -> None:
        """Remove all entries, and never cache blocks of the sequences that run now."""
        self.clear()
        self._root.cached = False  # those that have cached no block hold it
        self._root = _new_root()

    def _full_blocks(self, tokens: Sequence[int], max_tokens: int) -> list[PrefixEntry]:
        size = self.kv.block_size
        entries: list[PrefixEntry] = []
        parent = self._root
        while parent.end + size <= max_tokens:
            block = tuple(tokens[parent.end : parent.end + size])
            entry = self._entries.get((size, chain_hash(parent.hash, block)))
            if entry is None or not entry.continues(parent, block):
                break
            entries.append(entry)
            parent = entry
        return entries

    def _match_partial_block(
        self, parent: PrefixEntry, tokens: Sequence[int], max_tokens: int
    ) -> PrefixEntry | None:
        """Look up tails by their hashes, token by token, and return the longest that matches."""
        tail_tokens = tuple(
            tokens[parent.end : min(max_tokens, parent.end + self.kv.block_size - 1)]
        )
        candidates: list[PrefixEntry] = []
        hashed = parent.hash
        for count, token in enumerate(tail_tokens, 1):
            hashed = chain_hash(hashed, token)
            entry = self._entries.get((count, hashed))
            if entry is not None:
                candidates.append(entry)
        for entry in reversed(candidates):
            if entry.continues(parent, tail_tokens[: len(entry.tokens)]):
                return entry
        return None

    def _add(
        self, parent: PrefixEntry, tokens: tuple[int, ...], hashed: int, sequence: CachedSequence
    ) -> PrefixEntry:
        index = parent.end // self.kv.block_size
        block_ids = [block_list[index] for block_list in sequence.block_lists]
        self.kv.incref_blocks([each for each in block_ids if each != SCRATCH])
        entry = PrefixEntry(parent, tokens, hashed, parent.end + len(tokens), block_ids)
        for group in self._windowed:
            if block_ids[group] != SCRATCH:
                self._entry_of_block[block_ids[group]] = entry
        self._entries[entry.key] = entry
        parent.children[entry] = None
        return entry

    def _add_tail(self, tip: PrefixEntry, sequence: CachedSequence) -> None:
        count = sequence.num_stored - tip.end
        if not (tip.cached and 0 < count < self.kv.block_size):
            return
        tail_tokens = tuple(sequence.token_ids[tip.end : sequence.num_stored])
        hashed = reduce(chain_hash, tail_tokens, tip.hash)
        if (count, hashed) not in self._entries:
            self._mark_evictable_entry(self._add(tip, tail_tokens, hashed, sequence))

    def _remove_subtree(self, entry: PrefixEntry) -> None:
        """Remove an entry and its descendants, which no lookup can find without it."""
        if entry.parent is not None:
            del entry.parent.children[entry]
        leaving = [entry]
        for each in leaving:  # the list grows meanwhile
            leaving += each.children
            each.children = {}
            each.cached = False
            del self._entries[each.key]
            if not each.num_holders:
                del self.evictable_entries[each]
                self.num_evictable_blocks -= self._num_blocks(each)
            for group in self._windowed:
                self._unmark_evictable_block(_OutOfWindowBlock(each, group))
            for group in range(len(each.block_ids)):
                self._free_entry_block(each, group)

    def _free_entry_block(self, entry: PrefixEntry, group: int) -> None:
        """Free an entry's block in a group, if it has one."""
        block_id = entry.block_ids[group]
        if block_id != SCRATCH:
            self._entry_of_block.pop(block_id, None)
            self._borrowed_blocks.discard(block_id)
            self.kv.free_blocks(self.kv.groups[group].layers[0], [block_id])
            entry.block_ids[group] = SCRATCH

    def _acquire(self, entry: PrefixEntry, groups: Sequence[int]) -> None:
        """Hold an entry, and its blocks in these groups."""
        self.kv.incref_blocks([entry.block_ids[group] for group in groups])
        entry.num_holders += 1
        if entry in self.evictable_entries:
            del self.evictable_entries[entry]
            self.num_evictable_blocks -= self._num_blocks(entry)
        for group in self._windowed:
            if group in groups:
                self._unmark_evictable_block(_OutOfWindowBlock(entry, group))
            else:
                self._mark_evictable_block(entry, group)

    def _release_entry(self, entry: PrefixEntry) -> None:
        entry.num_holders -= 1
        if entry.cached and not entry.num_holders:
            for group in self._windowed:
                self._unmark_evictable_block(_OutOfWindowBlock(entry, group))
            self._mark_evictable_entry(entry)

    def _mark_evictable_entry(self, entry: PrefixEntry) -> None:
        self._uses += 1
        self.evictable_entries[entry] = self._uses
        self.num_evictable_blocks += self._num_blocks(entry)

    def _num_blocks(self, entry: PrefixEntry) -> int:
        """Return how many blocks of every pool the entry has."""
        if not self.kv.one_pool:
            return 1
        return sum(
            each != SCRATCH and each not in self._borrowed_blocks for each in entry.block_ids
        )

    # Blocks of windowed groups.

    def record_out_of_window(self, block_ids: Iterable[int]) -> None:
        """Record that a sequence gave back these blocks of windowed groups."""
        for block_id in block_ids:
            entry = self._entry_of_block.get(block_id)
            if entry is None or self.kv.refcount(block_id) > 1:
                continue
            lent = block_id in self._borrowed_blocks
            self._borrowed_blocks.discard(block_id)
            if entry.num_holders:
                self._mark_evictable_block(entry, entry.block_ids.index(block_id))
            elif lent:
                self.num_evictable_blocks += 1

    def _mark_evictable_block(self, entry: PrefixEntry, group: int) -> None:
        """Allow a block to be evicted without its entry, if only the cache holds it."""
        block_id, loose = entry.block_ids[group], _OutOfWindowBlock(entry, group)
        if (
            block_id != SCRATCH
            and loose not in self._evictable_blocks
            and self.kv.refcount(block_id) == 1
        ):
            self._uses += 1
            self._evictable_blocks[loose] = self._uses
            self.num_evictable_blocks += 1

    def _unmark_evictable_block(self, loose: _OutOfWindowBlock) -> None:
        if loose in self._evictable_blocks:
            del self._evictable_blocks[loose]
            self.num_evictable_blocks -= 1

    def _fill_missing_blocks(
        self, entry: PrefixEntry, sequence: CachedSequence, held_prefix: HeldPrefix
    ) -> None:
        """Give an entry the blocks that it lacks and that a sequence has computed again."""
        new_block_ids = [
            block_list[entry.end // self.kv.block_size - 1] for block_list in sequence.block_lists
        ]
        lacking = [
            at
            for at in self._windowed
            if entry.block_ids[at] == SCRATCH and new_block_ids[at] != SCRATCH
        ]
        for group in lacking:
            self.kv.incref_blocks([new_block_ids[group]])
            entry.block_ids[group] = new_block_ids[group]
            self._entry_of_block[new_block_ids[group]] = entry
            self._borrowed_blocks.add(new_block_ids[group])
        if lacking:
            held_prefix.completed.append(entry)

    def _longest_complete_prefix(self, entries: list[PrefixEntry]) -> list[PrefixEntry]:
        """Return the longest prefix whose next token attends to no missing block."""
        if not self._windowed:
            return entries
        size = self.kv.block_size
        gaps = [0] * len(self.kv.groups)
        """Number of entries up to the last one without a block, for each group."""
        max_entries = 0
        for count, entry in enumerate(entries, 1):
            for group in self._windowed:
                if entry.block_ids[group] == SCRATCH:
                    gaps[group] = count
            begins = [group.first_visible_position(entry.end) // size for group in self.kv.groups]
            if all(gap <= begin for gap, begin in zip(gaps, begins, strict=True)):
                max_entries = count
        return entries[:max_entries]

    def _release_all(self, held_prefix: HeldPrefix) -> None:
        """Release all entries. The whole path to the tip counts as just used."""
        for entry in (*held_prefix.matched, *held_prefix.inserted):
            self._release_entry(entry)
        if held_prefix.tail is not None:
            self._release_entry(held_prefix.tail)
        self._renew_path(held_prefix.tip)
        held_prefix.matched, held_prefix.inserted, held_prefix.completed = [], [], []
        held_prefix.tail = held_prefix.tip = None

    def _renew_path(self, tip: PrefixEntry | None) -> None:
        """Count the evictable entries of the path to ``tip`` as just used, the tip first."""
        while tip is not None:
            if tip in self.evictable_entries:
                self._uses += 1
                self.evictable_entries[tip] = self._uses
                self.evictable_entries.move_to_end(tip)
            tip = tip.parent
