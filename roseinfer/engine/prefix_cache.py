"""The prefix cache keeps blocks of sequences that have ended, and finds them by their tokens.

Its entries form a tree. Each is one block (one in each group of layers) under the entry of the
block before, so the way to it spells the whole prefix that its keys and values depend on. The
cache holds a reference on every block, so a sequence that appends to one writes into a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import InferenceSession


def chain_hash(before: int, link: int | tuple[int, ...]) -> int:
    """Return the hash of a prefix that is continued by a token or a block of tokens."""
    return hash((before, link))


@dataclass(slots=True, eq=False)
class Entry:
    """A block in the cache: full, or a tail, which is the partial last block of a sequence."""

    parent: Entry | None = field(repr=False)
    """The entry of the block before; None in the root, which has no block of its own."""
    tokens: tuple[int, ...]
    hash: int
    end: int
    """The position behind its last token."""
    block_ids: tuple[int, ...]
    """Its block in each group of layers."""
    users: int = 0
    children: dict[Entry, None] = field(default_factory=dict, repr=False)
    """In the order they came, so that the same history frees blocks in the same order."""
    cached: bool = True
    """False once it was taken out: its users keep it, and it is never found again."""

    @property
    def key(self) -> tuple[int, int]:
        """Its length is part of the key, so that a tail is never taken for a full block."""
        return len(self.tokens), self.hash

    def continues(self, parent: Entry, tokens: tuple[int, ...]) -> bool:
        """Return True if it holds these tokens behind ``parent``, as its hash suggests."""
        return self.parent is parent and self.tokens == tokens


@dataclass(slots=True, eq=False)
class Held:
    """What one sequence holds of the cache."""

    matched: list[Entry]
    """The full blocks that it began with, first to last."""
    tail: Entry | None
    """The partial block that it began with, until it has written to a copy of it."""
    tip: Entry | None
    """The sequence's last full block that is cached, whichever sequence brought it: the next one
    goes under it. None after the end."""
    inserted: list[Entry] = field(default_factory=list)
    """The blocks that it brought itself, first to last."""


class PrefixCache:
    """Shares the blocks of ``kv`` among prompts that begin alike.

    ``match`` is called when a sequence begins, ``insert`` when it has stored tokens, and
    ``release`` or ``forget`` at its end, before its blocks are freed.
    """

    def __init__(self, kv: KVBlockManager) -> None:
        self.kv = kv
        self.num_evictions = 0
        self._root = Entry(None, (), 0, 0, ())
        self._entries: dict[tuple[int, int], Entry] = {}
        self.unused: OrderedDict[Entry, None] = OrderedDict()
        """Entries that no sequence holds, the least recently used first. All can be evicted."""

    def match(self, tokens: Sequence[int]) -> tuple[Held, list[list[int]], int]:
        """Find the longest cached prefix that leaves a token to compute, and hold it.

        This returns it as held, as block lists, and how many tokens it has.
        """
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
        return Held(matched, tail, tip), block_lists, num_tokens

    def insert(self, held: Held, session: InferenceSession) -> None:
        """Add the blocks that a sequence has filled.

        Where a block of another sequence with the same tokens is cached, that one stays, and
        this sequence's own is not cached.
        """
        # What is stored of tokens in flight cannot be found, since nobody knows these yet.
        stored = min(session.stored, len(session.token_ids))
        if held.tail is not None and stored > held.tail.end:
            self._let_go(held.tail)
            held.tail = None
        size = self.kv.block_size
        while held.tip is not None and held.tip.cached and held.tip.end + size <= stored:
            tip = held.tip
            block = tuple(session.token_ids[tip.end : tip.end + size])
            hashed = chain_hash(tip.hash, block)
            entry = self._entries.get((size, hashed))
            if entry is None:
                entry = self._add(tip, block, hashed, session)
                entry.users = 1
                held.inserted.append(entry)
            elif not entry.continues(tip, block):
                return  # two prefixes with one hash: the older entry stays
            held.tip = entry

    def release(self, held: Held, session: InferenceSession) -> None:
        """End a sequence, and keep what it stored, its partial block too."""
        self.insert(held, session)
        # If it still holds a tail, it has no partial block of its own.
        if held.tip is not None and held.tail is None:
            self._add_tail(held.tip, session)
        self._end(held)

    def forget(self, held: Held) -> None:
        """End a sequence, and take out all that it brought, with what is below it."""
        for entry in held.inserted:
            if entry.cached:
                self._take_out(entry)
        self._end(held)

    def evict(self, blocks_needed: int) -> int:
        """Free that many blocks of every group, or all that can be, and return how many."""
        freed = 0
        while freed < blocks_needed and self.unused:
            self._take_out(next(iter(self.unused)))  # has no children
            freed += 1
        self.num_evictions += freed
        return freed

    def clear(self) -> None:
        """Take everything out. Blocks in use stay with their sequences."""
        for entry in list(self._root.children):
            self._take_out(entry)

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
        """Find tails by their hashes, token by token, and return the longest that is right."""
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

    def _add(
        self, parent: Entry, tokens: tuple[int, ...], hashed: int, session: InferenceSession
    ) -> Entry:
        index = parent.end // self.kv.block_size
        block_ids = tuple(block_list[index] for block_list in session.block_lists)
        self.kv.incref_blocks(block_ids)
        entry = Entry(parent, tokens, hashed, parent.end + len(tokens), block_ids)
        self._entries[entry.key] = entry
        parent.children[entry] = None
        return entry

    def _add_tail(self, tip: Entry, session: InferenceSession) -> None:
        count = session.stored - tip.end
        if not (tip.cached and 0 < count < self.kv.block_size):
            return
        rest = tuple(session.token_ids[tip.end : session.stored])
        hashed = reduce(chain_hash, rest, tip.hash)
        if (count, hashed) in self._entries:
            return
        # Another sequence cannot go on in a block with planned slots that hold nothing.
        index = tip.end // self.kv.block_size
        if all(self.kv.block_info(ids[index]).length == count for ids in session.block_lists):
            self.unused[self._add(tip, rest, hashed, session)] = None

    def _take_out(self, entry: Entry) -> None:
        """Take out an entry and all below it, which cannot be found without it."""
        if entry.parent is not None:
            del entry.parent.children[entry]
        leaving = [entry]
        for each in leaving:  # the list grows meanwhile
            leaving += each.children
            each.children = {}
            each.cached = False
            del self._entries[each.key]
            if not each.users:
                del self.unused[each]
        for group, block_ids in enumerate(zip(*(each.block_ids for each in leaving), strict=True)):
            self.kv.free_blocks(group * self.kv.layers_per_group, block_ids)

    def _hold(self, entry: Entry) -> None:
        self.kv.incref_blocks(entry.block_ids)
        entry.users += 1
        self.unused.pop(entry, None)

    def _let_go(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.cached and not entry.users:
            self.unused[entry] = None

    def _end(self, held: Held) -> None:
        """Let go of everything. The whole way to the tip counts as used just now, its end first."""
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
