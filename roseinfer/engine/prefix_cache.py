"""The prefix cache keeps blocks of sequences that have ended, and finds them by their tokens.

Its entries form a tree. Each is one block (one in each group of layers) under the entry of the
block before, so the way to it spells the whole prefix that its keys and values depend on. The
cache holds a reference on every block, so a sequence that appends to one writes into a copy.
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
    block_ids: list[int]
    """Its block in each group of layers; ``SCRATCH`` where that left a window and is gone."""
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


class _Loose(NamedTuple):
    """A block that an entry has in one group, and that no sequence holds which holds the entry."""

    entry: Entry
    group: int


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
    completed: list[Entry] = field(default_factory=list)
    """Entries that lacked blocks of layers with windows, and have them of this sequence."""


class PrefixCache:
    """Shares the blocks of ``kv`` among prompts that begin alike.

    ``match`` is called when a sequence begins, ``insert`` when it has stored tokens, and
    ``release`` or ``forget`` at its end, before its blocks are freed.
    """

    def __init__(self, kv: KVBlockManager) -> None:
        self.kv = kv
        self.num_evictions = 0
        self._root = Entry(None, (), 0, 0, [])
        self._entries: dict[tuple[int, int], Entry] = {}
        self._windowed = [at for at, own in enumerate(kv.groups) if own.window is not None]
        self._of_block: dict[int, Entry] = {}
        """The entry of every block of a group with a window."""
        self.unused: OrderedDict[Entry, int] = OrderedDict()
        """Entries that no sequence holds, the least recently used first, each with when that was.
        All can be evicted."""
        self._loose: OrderedDict[_Loose, int] = OrderedDict()
        """Blocks of other entries that left the windows of all that hold these, alike."""
        self._lent: set[int] = set()
        """Blocks that an entry has of a sequence that holds them yet, and not the entry."""
        self._uses = 0
        self.num_unused = 0
        """How many blocks of every pool can be freed by evicting."""

    def match(self, tokens: Sequence[int]) -> tuple[Held, list[list[int]], int]:
        """Find the longest cached prefix that leaves a token to compute, and hold it.

        This returns it as held, as block lists, and how many tokens it has.
        """
        most = len(tokens) - 1
        matched = self._full_blocks(tokens, most)
        tail = self._longest_tail(matched[-1] if matched else self._root, tokens, most)
        entries = self._seen_whole(matched if tail is None else [*matched, tail])
        if tail is not None and tail not in entries[-1:]:
            tail = None
        num_tokens = entries[-1].end if entries else 0
        begins = [0] * len(self.kv.groups)
        """The first entry of which a sequence has a block, for each group."""
        for group in self._windowed:
            begins[group] = self.kv.groups[group].first_seen(num_tokens) // self.kv.block_size
        for at, entry in enumerate(entries):
            self._hold(entry, [group for group, begin in enumerate(begins) if at >= begin])
        block_lists = [
            [SCRATCH] * begin + [entry.block_ids[group] for entry in entries[begin:]]
            for group, begin in enumerate(begins)
        ]
        matched = entries if tail is None else entries[:-1]
        return Held(matched, tail, matched[-1] if matched else self._root), block_lists, num_tokens

    def may_match(self, tokens: Sequence[int]) -> bool:
        """Tell if ``match`` may find something. Nothing is held."""
        found = self._full_blocks(tokens, min(len(tokens) - 1, self.kv.block_size))
        return bool(found) or self._longest_tail(self._root, tokens, len(tokens) - 1) is not None

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
            else:
                self._complete(entry, session, held)
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
        for entry in (*held.inserted, *held.completed):
            if entry.cached:
                self._take_out(entry)
        self._end(held)

    def evict(self, blocks_needed: int) -> int:
        """Free that many blocks of every pool, or all that can be, and return how many."""
        before = self.num_unused
        while before - self.num_unused < blocks_needed and (self.unused or self._loose):
            entry, used = next(iter(self.unused.items()), (None, self._uses + 1))
            loose, left = next(iter(self._loose.items()), (None, self._uses + 1))
            if entry is not None and used < left:
                self._take_out(entry)  # has no children
            elif loose is not None:
                self._drop_loose(loose)
                self._give_up(*loose)
            self.num_evictions += 1
        return before - self.num_unused

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
        block_ids = [block_list[index] for block_list in session.block_lists]
        self.kv.incref_blocks([each for each in block_ids if each != SCRATCH])
        entry = Entry(parent, tokens, hashed, parent.end + len(tokens), block_ids)
        for group in self._windowed:
            if block_ids[group] != SCRATCH:
                self._of_block[block_ids[group]] = entry
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
            self._note_unused(self._add(tip, rest, hashed, session))

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
                self.num_unused -= self._num_blocks(each)
            for group in self._windowed:
                self._drop_loose(_Loose(each, group))
            for group in range(len(each.block_ids)):
                self._give_up(each, group)

    def _give_up(self, entry: Entry, group: int) -> None:
        """Free an entry's block in a group, if it has one."""
        block_id = entry.block_ids[group]
        if block_id != SCRATCH:
            self._of_block.pop(block_id, None)
            self._lent.discard(block_id)
            self.kv.free_blocks(self.kv.groups[group].layers[0], [block_id])
            entry.block_ids[group] = SCRATCH

    def _hold(self, entry: Entry, groups: Sequence[int]) -> None:
        """Hold an entry, and its blocks in these groups."""
        self.kv.incref_blocks([entry.block_ids[group] for group in groups])
        entry.users += 1
        if entry in self.unused:
            del self.unused[entry]
            self.num_unused -= self._num_blocks(entry)
        for group in self._windowed:
            if group in groups:
                self._drop_loose(_Loose(entry, group))
            else:
                self._note_loose(entry, group)

    def _let_go(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.cached and not entry.users:
            for group in self._windowed:
                self._drop_loose(_Loose(entry, group))
            self._note_unused(entry)

    def _note_unused(self, entry: Entry) -> None:
        self._uses += 1
        self.unused[entry] = self._uses
        self.num_unused += self._num_blocks(entry)

    def _num_blocks(self, entry: Entry) -> int:
        """Return how many blocks of every pool the entry has."""
        if not self.kv.one_pool:
            return 1
        return sum(each != SCRATCH and each not in self._lent for each in entry.block_ids)

    # ------------------------------------------------------------------- with windows

    def note_given_back(self, block_ids: Iterable[int]) -> None:
        """Note that a sequence does not hold these blocks any more, which left its windows."""
        for block_id in block_ids:
            entry = self._of_block.get(block_id)
            if entry is None or self.kv.refcount(block_id) > 1:
                continue
            lent = block_id in self._lent
            self._lent.discard(block_id)
            if entry.users:
                self._note_loose(entry, entry.block_ids.index(block_id))
            elif lent:
                self.num_unused += 1

    def _note_loose(self, entry: Entry, group: int) -> None:
        """Let a block be evicted alone, if only the cache holds it."""
        block_id, loose = entry.block_ids[group], _Loose(entry, group)
        if block_id != SCRATCH and loose not in self._loose and self.kv.refcount(block_id) == 1:
            self._uses += 1
            self._loose[loose] = self._uses
            self.num_unused += 1

    def _drop_loose(self, loose: _Loose) -> None:
        if loose in self._loose:
            del self._loose[loose]
            self.num_unused -= 1

    def _complete(self, entry: Entry, session: InferenceSession, held: Held) -> None:
        """Give an entry the blocks that it lacks and that the sequence has computed again."""
        own = [
            block_list[entry.end // self.kv.block_size - 1] for block_list in session.block_lists
        ]
        lacking = [
            at for at in self._windowed if entry.block_ids[at] == SCRATCH and own[at] != SCRATCH
        ]
        for group in lacking:
            self.kv.incref_blocks([own[group]])
            entry.block_ids[group] = own[group]
            self._of_block[own[group]] = entry
            self._lent.add(own[group])
        if lacking:
            held.completed.append(entry)

    def _seen_whole(self, entries: list[Entry]) -> list[Entry]:
        """Return the longest beginning behind which no token sees what is not there."""
        if not self._windowed:
            return entries
        size = self.kv.block_size
        gaps = [0] * len(self.kv.groups)
        """Behind each group's last entry that has no block there."""
        longest = 0
        for count, entry in enumerate(entries, 1):
            for group in self._windowed:
                if entry.block_ids[group] == SCRATCH:
                    gaps[group] = count
            begins = [group.first_seen(entry.end) // size for group in self.kv.groups]
            if all(gap <= begin for gap, begin in zip(gaps, begins, strict=True)):
                longest = count
        return entries[:longest]

    def _end(self, held: Held) -> None:
        """Let go of everything. The whole way to the tip counts as used just now, its end first."""
        for entry in (*held.matched, *held.inserted):
            self._let_go(entry)
        if held.tail is not None:
            self._let_go(held.tail)
        passed = held.tip
        while passed is not None:
            if passed in self.unused:
                self._uses += 1
                self.unused[passed] = self._uses
                self.unused.move_to_end(passed)
            passed = passed.parent
        held.matched, held.inserted, held.completed = [], [], []
        held.tail = held.tip = None
