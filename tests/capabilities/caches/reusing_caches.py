"""Caches that reuse what was returned to them: handles, slots, lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec


@dataclass(slots=True, eq=False)
class Places:
    """The blocks and positions of a reservation's tokens."""

    blocks: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class ReusesHandles(PagedCache):
    conditions = (*PagedCache.conditions, "handle_used_again")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.spare: list[Places] = []

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> Places:
        size = self.spec.block_size
        lengths = [(self.lengths[seq], count) for seq, count in zip(seqs, counts, strict=True)]
        needed = sum(-(-(old + count) // size) + -old // size for old, count in lengths)
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        places = self.spare.pop() if self.spare else Places()
        for seq, count in zip(seqs, counts, strict=True):
            for _ in range(count):
                self.place(seq, places)
        return places

    def place(self, seq: int, places: Places) -> None:
        position = self.position(seq)
        if position == 0:
            self.tables.setdefault(seq, []).append(self.unused.pop(0))
            self.counts["new_block"] += 1
        places.blocks.append(self.tables[seq][-1])
        places.positions.append(position)
        self.lengths[seq] += 1

    def fill(self, reservation: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        self.write(reservation.blocks, reservation.positions, key, value)
        self.give_back(reservation)

    def write(self, blocks: list[int], positions: list[int], *kv: torch.Tensor) -> None:
        super().write(blocks, positions, *kv)

    def give_back(self, places: Places) -> None:
        places.blocks.clear()
        places.positions.clear()
        self.spare.append(places)


class HandsBackAFullHandle(ReusesHandles):
    """Reuses a handle that still holds its old blocks."""

    def give_back(self, places: Places) -> None:
        self.spare.append(places)

    def write(self, blocks: list[int], positions: list[int], *kv: torch.Tensor) -> None:
        count = kv[0].shape[1]
        super().write(blocks[:count], positions[:count], *kv)


class ReusesSlots(PagedCache):
    """Stores a sequence's length in its slot; takes the lowest free slot."""

    conditions = (*PagedCache.conditions, "slot_used_again")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.slots: dict[int, int] = {}
        self.length_of_slot: Counter[int] = Counter()
        """The length of the sequence in each slot."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        new = [seq for seq in seqs if seq not in self.slots]
        for seq in new:
            self.slots[seq] = self.free_slot()
            self.lengths[seq] = self.length_in(self.slots[seq])
        try:
            super().append(seqs, key, value)
        except CacheFull:
            for seq in new:
                del self.slots[seq], self.lengths[seq]
            raise
        for seq in seqs:
            self.length_of_slot[self.slots[seq]] += 1

    def length_in(self, slot: int) -> int:
        """Return the initial length of a sequence in a slot."""
        return self.length_of_slot[slot]

    def free_slot(self) -> int:
        return next(slot for slot in range(999) if slot not in self.slots.values())

    def free(self, seq: int) -> None:
        super().free(seq)
        self.clear(self.slots.pop(seq))

    def clear(self, slot: int) -> None:
        self.length_of_slot[slot] = 0

    def container(self, seq: int) -> int | list[Any]:
        return self.slots[seq]


class LeavesASlotActive(ReusesSlots):
    """Begins a sequence with the length left in its slot."""

    def clear(self, slot: int) -> None:
        pass


class PutsTwoInASlot(ReusesSlots):
    """12: lists a freed slot twice as free, though nothing reads back wrong yet."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.free_slots: list[int] = []

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.free_slots += [slot, slot]

    def free_slot(self) -> int:
        return self.free_slots.pop() if self.free_slots else super().free_slot()

    def length_in(self, slot: int) -> int:
        return slot * 0


class ReusesLists(PagedCache):
    conditions = (*PagedCache.conditions, "list_used_again")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.spare: list[list[int]] = []

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for seq in seqs:
            if seq not in self.tables:
                self.tables[seq] = self.spare.pop() if self.spare else []
        super().append(seqs, key, value)

    def free(self, seq: int) -> None:
        table = self.tables[seq]
        super().free(seq)
        table.clear()
        self.spare.append(table)

    def container(self, seq: int) -> int | list[Any]:
        return self.tables[seq]


class CachesIndicesByListIdentity(ReusesLists):
    """14: caches the indices of a list by its identity and length."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.indices: dict[tuple[int, int], list[int]] = {}

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.tables[seq]
        cached = self.indices.setdefault((id(table), len(table)), list(table))
        keys, values = (
            cache[layer, cached].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in (self.keys, self.values)
        )
        return keys, values
