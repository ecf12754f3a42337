"""Caches that give out again what they got back: handles, slots, lists."""

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
    """Where the tokens of a reservation go."""

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
    """What a handle was used for is still in it when it is used again."""

    def give_back(self, places: Places) -> None:
        self.spare.append(places)

    def write(self, blocks: list[int], positions: list[int], *kv: torch.Tensor) -> None:
        count = kv[0].shape[1]
        super().write(blocks[:count], positions[:count], *kv)


class ReusesSlots(PagedCache):
    """What it knows of a sequence is in its slot; the lowest free one is taken."""

    conditions = (*PagedCache.conditions, "slot_used_again")

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.slots: dict[int, int] = {}
        self.of_slot: Counter[int] = Counter()
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
            self.of_slot[self.slots[seq]] += 1

    def length_in(self, slot: int) -> int:
        """Return the length of a sequence that begins in a slot."""
        return self.of_slot[slot]

    def free_slot(self) -> int:
        return next(slot for slot in range(99) if slot not in self.slots.values())

    def free(self, seq: int) -> None:
        super().free(seq)
        self.clear(self.slots.pop(seq))

    def clear(self, slot: int) -> None:
        self.of_slot[slot] = 0

    def container(self, seq: int) -> int | list[Any]:
        return self.slots[seq]


class LeavesASlotActive(ReusesSlots):
    """A slot that was left is as long as the sequence that left it."""

    def clear(self, slot: int) -> None:
        pass


class PutsTwoInASlot(ReusesSlots):
    """12: a slot that was freed is free twice. Nothing reads back wrong as yet."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.left: list[int] = []

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.left += [slot, slot]

    def free_slot(self) -> int:
        return self.left.pop() if self.left else super().free_slot()

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


class KnowsListsByIdentity(ReusesLists):
    """14: it makes the indices of a list once for each length that the list has."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.indices: dict[tuple[int, int], list[int]] = {}

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.tables[seq]
        known = self.indices.setdefault((id(table), len(table)), list(table))
        keys, values = (
            cache[layer, known].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in (self.keys, self.values)
        )
        return keys, values
