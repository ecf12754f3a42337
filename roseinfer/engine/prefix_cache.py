"""Blocks that outlive their sequences, found again by the tokens they hold.

Every entry is one block (one in each group of layers) behind the entry of the block before
it, so that the way to an entry spells the whole prefix its keys and values depend on. The
cache holds a reference on each of its blocks: a sequence that appends to one is given a
copy, and what an entry says of its block stays true.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.manager import KVBlockManager


def chain_hash(before: int, link: int | tuple[int, ...]) -> int:
    """The hash of a prefix made longer by a token or by a block of them."""
    return hash((before, link))


@dataclass(slots=True, eq=False)
class Entry:
    """A block in the cache: full, or a tail that the end of a sequence left partial."""

    parent: Entry | None = field(repr=False)
    """The entry of the block before; None in the root, which has no block of its own."""
    tokens: tuple[int, ...]
    hash: int
    end: int
    """Position behind its last token."""
    block_ids: tuple[int, ...]
    """Its block in each group of layers."""
    users: int = 0
    """How many sequences hold it."""
    children: dict[Entry, None] = field(default_factory=dict, repr=False)
    """In the order they came, so that the same history frees blocks in the same order."""
    cached: bool = True
    """It can be found. An entry taken out stays with its users and is never found again."""

    @property
    def key(self) -> tuple[int, int]:
        """The number of tokens is part of it: a tail is never taken for a full block."""
        return len(self.tokens), self.hash

    def continues(self, parent: Entry, tokens: tuple[int, ...]) -> bool:
        """It is what its hash suggests."""
        return self.parent is parent and self.tokens == tokens


@dataclass(slots=True, eq=False)
class Held:
    """What one sequence holds of the cache."""

    matched: list[Entry]
    """The full blocks it began with, first to last."""
    tail: Entry | None
    """The partial block it began with, until it has written behind it, to a copy."""
    tip: Entry | None
    """The last full block of the sequence that is cached, from whichever sequence it came;
    the next one goes under it. None when the sequence is through with the cache."""
    inserted: list[Entry] = field(default_factory=list)
    """The blocks that it brought itself, first to last."""


@dataclass(slots=True)
class Match:
    """What the cache had for a prompt: a sequence's beginning, already held for it."""

    held: Held
    block_lists: list[list[int]]
    num_tokens: int
    """How many tokens the blocks hold."""


class PrefixCache:
    """Shares the blocks of ``kv`` among prompts that begin alike.

    ``match`` begins a sequence, ``insert`` follows each of its forward passes, and one of
    ``release`` and ``forget`` ends it, just before its blocks are freed.
    """

    def __init__(self, kv: KVBlockManager) -> None:
        self.kv = kv
        self.num_lookups = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self._root = Entry(None, (), 0, 0, ())
        self._entries: dict[tuple[int, int], Entry] = {}
        self.unused: OrderedDict[Entry, None] = OrderedDict()
        """Entries that nobody uses, the least recently used first: all of them can be evicted."""

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix that leaves a token to compute, held from here on."""
        most = len(tokens) - 1
        matched = self._full_blocks(tokens, most)
        tip = matched[-1] if matched else self._root
        tail = self._longest_tail(tip, tokens, most)
        entries = matched if tail is None else [*matched, tail]
        for entry in entries:
            self._hold(entry)
        groups = range(self.kv.num_layers // self.kv.layers_per_group)
        block_lists = [[entry.block_ids[group] for entry in entries] for group in groups]
        num_tokens = entries[-1].end if entries else 0
        self.num_lookups += 1
        self.num_hit_tokens += num_tokens
        return Match(Held(matched, tail, tip), block_lists, num_tokens)

    def insert(
        self, held: Held, tokens: Sequence[int], block_lists: list[list[int]], stored: int
    ) -> None:
        """Register the blocks that the sequence's first ``stored`` tokens have filled.

        Where somebody else's block with the same tokens is cached, that one stays, and the
        sequence keeps its own without it being cached.
        """
        if held.tail is not None and stored > held.tail.end:
            self._let_go(held.tail)
            held.tail = None
        size = self.kv.block_size
        while held.tip is not None and held.tip.cached and held.tip.end + size <= stored:
            tip = held.tip
            block = tuple(tokens[tip.end : tip.end + size])
            hashed = chain_hash(tip.hash, block)
            entry = self._entries.get((size, hashed))
            if entry is None:
                entry = self._add(tip, block, hashed, block_lists)
                entry.users = 1
                held.inserted.append(entry)
            elif not entry.continues(tip, block):
                return  # the older entry stays; nothing can hang under one that is not there
            held.tip = entry

    def release(
        self, held: Held, tokens: Sequence[int], block_lists: list[list[int]], stored: int
    ) -> None:
        """Keep what the sequence stored, a partial block too, for others to match."""
        self.insert(held, tokens, block_lists, stored)
        # A tail it still holds is no block of its own: once taken out, others may hold it too.
        if held.tip is not None and held.tail is None:
            self._add_tail(held.tip, tokens, block_lists, stored)
        self._end(held)

    def forget(self, held: Held) -> None:
        """Take out all that the sequence brought, and what followed it; end its hold."""
        for entry in held.inserted:
            if entry.cached:
                self._take_out(entry)
        self._end(held)

    def evict(self, blocks_needed: int) -> int:
        """Free that many blocks of every group, or all that can be; return how many."""
        freed = 0
        while freed < blocks_needed and self.unused:
            self._take_out(next(iter(self.unused)))  # nothing unused is left below it
            freed += 1
        self.num_evictions += freed
        return freed

    def clear(self) -> None:
        """Take everything out; blocks in use stay with their sequences."""
        for entry in list(self._root.children):
            self._take_out(entry)

    # -------------------------------------------------------------------------------- finding

    def _full_blocks(self, tokens: Sequence[int], most: int) -> list[Entry]:
        size = self.kv.block_size
        found: list[Entry] = []
        parent = self._root
        while parent.end + size <= most:
            block = tuple(tokens[parent.end : parent.end + size])
            entry = self._entries.get((size, chain_hash(parent.hash, block)))
            if entry is None or not entry.continues(parent, block):
                break
            found.append(entry)
            parent = entry
        return found

    def _longest_tail(self, parent: Entry, tokens: Sequence[int], most: int) -> Entry | None:
        """Hashed token by token; compared from the longest down, of which the first holds."""
        rest = tuple(tokens[parent.end : min(most, parent.end + self.kv.block_size - 1)])
        found: list[Entry] = []
        hashed = parent.hash
        for count, token in enumerate(rest, 1):
            hashed = chain_hash(hashed, token)
            entry = self._entries.get((count, hashed))
            if entry is not None:
                found.append(entry)
        for entry in reversed(found):
            if entry.continues(parent, rest[: len(entry.tokens)]):
                return entry
        return None

    # ---------------------------------------------------------------------- coming and going

    def _add(
        self, parent: Entry, tokens: tuple[int, ...], hashed: int, block_lists: list[list[int]]
    ) -> Entry:
        index = parent.end // self.kv.block_size
        block_ids = tuple(block_list[index] for block_list in block_lists)
        self.kv.incref_blocks(block_ids)
        entry = Entry(parent, tokens, hashed, parent.end + len(tokens), block_ids)
        self._entries[entry.key] = entry
        parent.children[entry] = None
        return entry

    def _add_tail(
        self, tip: Entry, tokens: Sequence[int], block_lists: list[list[int]], stored: int
    ) -> None:
        count = stored - tip.end
        if not (tip.cached and 0 < count < self.kv.block_size):
            return
        hashed = tip.hash
        for token in tokens[tip.end : stored]:
            hashed = chain_hash(hashed, token)
        if (count, hashed) in self._entries or self._more_is_planned(tip, block_lists, count):
            return
        tail = self._add(tip, tuple(tokens[tip.end : stored]), hashed, block_lists)
        self.unused[tail] = None

    def _more_is_planned(self, tip: Entry, block_lists: list[list[int]], count: int) -> bool:
        """The block behind ``tip`` has slots given out that hold nothing: none can go on there."""
        index = tip.end // self.kv.block_size
        return any(self.kv.block_info(ids[index]).length != count for ids in block_lists)

    def _take_out(self, entry: Entry) -> None:
        """Nothing below can be found without it, so all that goes too."""
        if entry.parent is not None:
            del entry.parent.children[entry]
        leaving = [entry]
        for each in leaving:  # grows as it goes
            leaving += each.children
            each.children = {}
            each.cached = False
            del self._entries[each.key]
            if not each.users:
                del self.unused[each]
        for group, block_ids in enumerate(zip(*(each.block_ids for each in leaving), strict=True)):
            self.kv.free_blocks(group * self.kv.layers_per_group, block_ids)

    # -------------------------------------------------------------------------------- holding

    def _hold(self, entry: Entry) -> None:
        self.kv.incref_blocks(entry.block_ids)
        entry.users += 1
        self.unused.pop(entry, None)

    def _let_go(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.cached and not entry.users:
            self.unused[entry] = None

    def _end(self, held: Held) -> None:
        """Let go of everything. What the sequence went through counts as used, its end first."""
        for entry in (*held.matched, *held.inserted):
            self._let_go(entry)
        if held.tail is not None:
            self._let_go(held.tail)
        passed = held.tip
        while passed is not None:
            if passed in self.unused:
                self.unused.move_to_end(passed)
            passed = passed.parent
        held.matched, held.inserted, held.tail, held.tip = [], [], None, None
