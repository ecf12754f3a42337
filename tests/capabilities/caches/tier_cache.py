"""Prefix caches with lower tiers, in two designs. They are right.

One stores blocks as soon as they are full, and holds them until they are stored. The other stores
them when they are evicted, from a copy, and has a third tier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import torch

from pytest_roseinfer import TierTraits, Transfer, TransferResult
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import CacheSpec


@dataclass(slots=True)
class SlotCopy:
    """A copy between blocks of the first tier and slots of the second."""

    keys: list[Hashable]
    """Keys of the blocks."""
    blocks: list[int]
    slots: list[int]
    seq: int | None = None
    """Sequence that waits for it; None for a store, and once the sequence is freed."""
    ids: list[int] = field(default_factory=list)
    """Token ids up to the end of the last block, for a load."""


class WriteThroughCache(TextCache):
    """Begins to store the blocks that a write has filled, and holds them until the end."""

    SLOTS: ClassVar = 6
    tiers = TierTraits(keeps=SLOTS)
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4,)
    block_sizes: ClassVar[Sequence[int]] = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        shape = (2, spec.num_layers, self.SLOTS, spec.num_heads, spec.block_size, spec.head_dim)
        self.second = torch.zeros(shape, dtype=self.keys.dtype, device=spec.device)
        self.slot_of: OrderedDict[Hashable, int] = OrderedDict()
        """Slots of stored blocks, the least recently used first."""
        self.free_slots = list(range(self.SLOTS))
        self.copies: dict[int, SlotCopy] = {}
        """Copies in flight."""
        self.num_copies = 0
        self.filled: list[int] = []
        """Blocks that the present write has filled."""

    # Stores

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        self.store_filled()

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().prefill(seq, key, value)
        self.store_filled()

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        super().register(table, token_ids)
        self.filled.append(table[-1])

    def store_filled(self) -> None:
        blocks, self.filled = list(dict.fromkeys(self.filled)), []
        coming = {key for each in self.copies.values() for key in each.keys}
        keys = [self.key_of[block] for block in blocks if block in self.key_of]
        keys = [key for key in keys if key not in self.slot_of and key not in coming]
        slots = self.take_slots(len(keys))
        if slots:
            keys = keys[: len(slots)]
            self.begin(SlotCopy(keys, [self.block_of[key] for key in keys], slots))

    def take_slots(self, count: int) -> list[int]:
        """Take free slots, and those of the least recently used blocks that are not being read."""
        read = self.slots_being_read()
        evictable = [key for key, slot in self.slot_of.items() if slot not in read]
        while len(self.free_slots) < count and evictable:
            self.free_slots.append(self.evict_slot(evictable.pop(0)))
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken

    def slots_being_read(self) -> set[int]:
        loads = (each for each in self.copies.values() if each.ids)
        return {slot for each in loads for slot in each.slots}

    def evict_slot(self, key: Hashable) -> int:
        return self.slot_of.pop(key)

    def begin(self, copy: SlotCopy) -> None:
        self.copies[self.num_copies] = copy
        self.num_copies += 1
        for block in copy.blocks:
            self.hold(block)

    # Loads

    def match_tiers(self, token_ids: Sequence[int]) -> int:
        found = len(self.found(token_ids))
        return (found + len(self.stored_after(token_ids, found))) * self.spec.block_size

    def stored_after(self, token_ids: Sequence[int], found: int) -> list[Hashable]:
        """Return the keys of the blocks after the first ``found`` that are in the second tier."""
        size = self.spec.block_size
        keys: list[Hashable] = []
        for end in range((found + 1) * size, len(token_ids) + 1, size):
            key = self.key(token_ids[:end])
            if key not in self.slot_of:
                break
            keys.append(key)
        return keys

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        ready = self.begin_with(prefix, seq)
        keys = self.stored_after(prefix, len(self.tables[seq]))[: len(self.unused)]
        if not keys:
            return ready, 0
        size = self.spec.block_size
        blocks = [self.open() for _ in keys]
        self.tables[seq] = [*self.tables[seq], *blocks]
        slots = [self.slot_of[key] for key in keys]
        for key in keys:
            self.slot_of.move_to_end(key)
        tokens = ready + len(keys) * size
        self.begin(SlotCopy(keys, blocks, slots, seq, list(prefix[:tokens])))
        return ready, len(keys) * size

    def free(self, seq: int) -> None:
        for each in self.copies.values():
            if each.seq == seq:
                each.seq = None
        super().free(seq)

    # Ends

    def transfers_in_flight(self) -> list[Transfer]:
        return [
            Transfer(number, "load" if each.ids else "store", each.blocks, each.seq)
            for number, each in self.copies.items()
        ]

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        number = transfer.id
        assert isinstance(number, int)
        self.copy(self.copies[number], result.arrived)
        answers = [self.report(number, result) for _ in range(result.reports)]
        return answers[0]

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        blocks, slots = copy.blocks[:arrived], copy.slots[:arrived]
        for cache, other in zip((self.keys, self.values), self.second, strict=True):
            if copy.ids:
                cache[:, blocks] = other[:, slots]
            else:
                other[:, slots] = cache[:, blocks]

    def report(self, number: int, result: TransferResult) -> int | None:
        """Handle the report of a result; a second one of the same copy is ignored."""
        copy = self.copies.pop(number, None)
        if copy is None:
            return None
        if copy.ids:
            return self.end_load(copy, result.reported)
        self.end_store(copy, result)
        return None

    def end_store(self, store: SlotCopy, result: TransferResult) -> None:
        for at, (key, slot) in enumerate(zip(store.keys, store.slots, strict=True)):
            if at < result.reported:
                self.show(key, slot)
            else:
                self.free_slots.append(slot)
        self.let_go(store)

    def show(self, key: Hashable, slot: int) -> None:
        """Let lookups find a block in a slot."""
        self.slot_of[key] = slot

    def let_go(self, copy: SlotCopy) -> None:
        """Drop the references of a copy to its blocks, and free slots without a key."""
        for block in copy.blocks:
            self.drop(block)
        if copy.ids:
            kept = {*self.slot_of.values(), *self.free_slots, *self.slots_being_read()}
            self.free_slots += [slot for slot in copy.slots if slot not in kept]

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        if load.seq is None:
            self.let_go(load)
            return None
        table, size = self.tables[load.seq], self.spec.block_size
        begin = len(table) - len(load.blocks)
        self.tables[load.seq] = table[: begin + reported]
        for block in table[begin + reported :]:
            self.drop(block)
        self.token_ids[load.seq] = load.ids[: (begin + reported) * size]
        self.let_go(load)
        for at in range(begin, begin + reported):
            up_to = self.tables[load.seq][: at + 1]
            self.register(up_to, load.ids[: (at + 1) * size])
            self.tables[load.seq][at] = up_to[-1]
        self.filled = []
        return (begin + reported) * size

    def restart_tiers(self, keep: bool) -> None:
        if keep:
            self.reopen()
        else:
            kept = self.slots_being_read()
            self.free_slots += [slot for slot in self.slot_of.values() if slot not in kept]
            self.slot_of.clear()

    def reopen(self) -> None:
        """Read the index that was written with the blocks."""


class ChecksumCache(WriteThroughCache):
    """Stores a checksum with each block, and drops loaded blocks that do not have theirs."""

    tiers = WriteThroughCache.tiers.but(verifies=True)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.sums: dict[Hashable, int] = {}

    def begin(self, copy: SlotCopy) -> None:
        super().begin(copy)
        if not copy.ids:
            self.sums |= {
                key: self.checksum(block) for key, block in zip(copy.keys, copy.blocks, strict=True)
            }

    def checksum(self, block: int) -> int:
        rows = torch.stack([self.keys[:, block], self.values[:, block]])
        return crc32(rows.cpu().view(torch.uint8).numpy().tobytes())

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        pairs = zip(load.keys, load.blocks[:reported], strict=False)
        right = [self.is_right(key, block) for key, block in pairs]
        return super().end_load(load, [*right, False].index(False))

    def is_right(self, key: Hashable, block: int) -> bool:
        return self.sums[key] == self.checksum(block)


class LoadsAtOnceCache(WriteThroughCache):
    """Waits for a load when it begins, as for a copy from the host's memory, which cannot fail."""

    tiers = WriteThroughCache.tiers.but(can_fail=False)

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        ready, coming = super().load_prefix(prefix, seq)
        if coming:
            load = self.transfers_in_flight()[-1]
            self.end_transfer(load, TransferResult(load.num_blocks, load.num_blocks))
        return ready + coming, 0


Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one block in all layers."""


@dataclass(slots=True)
class Descent:
    """A block on its way to a lower tier, with its data."""

    key: Hashable
    rows: Rows
    blocks: list[int]
    """Block of the first tier that it was copied from; empty if it comes from the second tier."""


@dataclass(slots=True)
class Ascent:
    """Blocks on their way to the first tier, for a sequence."""

    seq: int | None
    ids: list[int]
    blocks: list[int]
    rows: list[Rows]


class WriteBackCache(TextCache):
    """Copies a block when it evicts it, and stores the copy.

    A block that the second tier evicts goes on to a third one.
    """

    SECOND: ClassVar = 2
    """Blocks of the second tier."""
    THIRD: ClassVar = 3
    tiers = TierTraits(holds_blocks=False, keeps=SECOND)
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4,)
    block_sizes: ClassVar[Sequence[int]] = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.second: OrderedDict[Hashable, Rows] = OrderedDict()
        self.third: OrderedDict[Hashable, Rows] = OrderedDict()
        self.moving: dict[int, Descent | Ascent] = {}
        self.moves = 0

    def open(self) -> int:
        block = self.unused[0]
        if (key := self.key_of.get(block)) is not None and not self.has(key):
            self.begin(Descent(key, self.read(block), [block]))
        return super().open()

    def has(self, key: Hashable) -> bool:
        """Return True for a block that is in a lower tier, or on its way to one."""
        down = (each for each in self.moving.values() if isinstance(each, Descent))
        return self.is_below(key) or any(each.key == key for each in down)

    def is_below(self, key: Hashable) -> bool:
        return key in self.second or key in self.third

    def read(self, block: int) -> Rows:
        return self.keys[:, block].clone(), self.values[:, block].clone()

    def begin(self, move: Descent | Ascent) -> None:
        self.moving[self.moves] = move
        self.moves += 1

    def match_tiers(self, token_ids: Sequence[int]) -> int:
        found = len(self.found(token_ids))
        return (found + len(self.below(token_ids, found))) * self.spec.block_size

    def below(self, token_ids: Sequence[int], found: int) -> list[Hashable]:
        size = self.spec.block_size
        ends = range((found + 1) * size, len(token_ids) + 1, size)
        keys = [self.key(token_ids[:end]) for end in ends]
        missing = next((at for at, key in enumerate(keys) if not self.is_below(key)), len(keys))
        return keys[:missing]

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        ready = self.begin_with(prefix, seq)
        keys = self.below(prefix, len(self.tables[seq]))[: len(self.unused)]
        if not keys:
            return ready, 0
        rows = [self.fetch(key) for key in keys]
        blocks = [self.open() for _ in keys]
        self.tables[seq] = [*self.tables[seq], *blocks]
        coming = len(keys) * self.spec.block_size
        self.begin(Ascent(seq, list(prefix[: ready + coming]), blocks, rows))
        for block in blocks:
            self.hold(block)
        return ready, coming

    def fetch(self, key: Hashable) -> Rows:
        """Return the data of a block in a lower tier, which becomes the most recently used."""
        tier = self.second if key in self.second else self.third
        tier.move_to_end(key)
        return tier[key]

    def free(self, seq: int) -> None:
        for each in self.moving.values():
            if isinstance(each, Ascent) and each.seq == seq:
                each.seq = None
        super().free(seq)

    def transfers_in_flight(self) -> list[Transfer]:
        return [self.transfer(number, each) for number, each in self.moving.items()]

    def transfer(self, number: int, move: Descent | Ascent) -> Transfer:
        if isinstance(move, Ascent):
            return Transfer(number, "load", move.blocks, move.seq)
        if move.blocks:
            return Transfer(number, "store", move.blocks)
        return Transfer(number, "move", moved=1)

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        assert isinstance(transfer.id, int)
        move = self.moving.pop(transfer.id)
        if isinstance(move, Ascent):
            return self.ascend(move, result.arrived)
        if result.reported:
            self.descend(move)
        return None

    def descend(self, move: Descent) -> None:
        if not move.blocks:
            self.third[move.key] = move.rows
            if len(self.third) > self.THIRD:
                self.evict_third()
            return
        self.second[move.key] = move.rows
        if len(self.second) > self.SECOND:
            key, rows = self.second.popitem(last=False)
            self.begin(Descent(key, rows, []))

    def evict_third(self) -> None:
        self.third.popitem(last=False)

    def ascend(self, move: Ascent, arrived: int) -> int | None:
        for block, rows in zip(move.blocks[:arrived], move.rows, strict=False):
            self.keys[:, block], self.values[:, block] = rows
        for block in move.blocks:
            self.drop(block)
        if move.seq is None:
            return None
        table, size = self.tables[move.seq], self.spec.block_size
        kept = len(table) - len(move.blocks) + arrived
        for block in table[kept:]:
            self.drop(block)
        self.token_ids[move.seq] = move.ids[: kept * size]
        for at in range(kept - arrived, kept):
            up_to = table[: at + 1]
            self.register(up_to, move.ids[: (at + 1) * size])
            table[at] = up_to[-1]
        del table[kept:]
        return kept * size

    def restart_tiers(self, keep: bool) -> None:
        if not keep:
            self.second.clear()
            self.third.clear()


class StoresEvictedCache(WriteBackCache):
    """Stores a block before it evicts it, and is done with that then."""

    tiers = TierTraits(stores_evicted=True)

    def begin(self, move: Descent | Ascent) -> None:
        if isinstance(move, Descent):
            self.descend(move)
        else:
            super().begin(move)


RIGHT = (WriteThroughCache, ChecksumCache, LoadsAtOnceCache, WriteBackCache, StoresEvictedCache)
