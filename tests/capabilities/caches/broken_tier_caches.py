"""Prefix caches with broken lower tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tests.capabilities.caches.tier_cache import (
    Ascent,
    ChecksumCache,
    Descent,
    SlotCopy,
    WriteBackCache,
    WriteThroughCache,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pytest_roseinfer import CacheSpec, Transfer, TransferResult


class CountsAFailedLoad(WriteThroughCache):
    """T14: counts the blocks of a failed load as loaded."""

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        return super().end_load(load, reported or len(load.blocks))


class ShowsAFailedStore(WriteThroughCache):
    """T14: finds blocks whose store has failed."""

    def end_store(self, store: SlotCopy, result: TransferResult) -> None:
        super().end_store(store, replace(result, reported=len(store.blocks)))


class CountsAPartAsTheWhole(WriteThroughCache):
    """T14: counts all blocks of a load as loaded when the first ones have arrived."""

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        return super().end_load(load, len(load.blocks) if reported else 0)


class StoresAPartAsTheWhole(WriteThroughCache):
    """T14: finds all blocks of a store of which only the first ones have arrived."""

    def end_store(self, store: SlotCopy, result: TransferResult) -> None:
        whole = len(store.blocks) if result.reported else 0
        super().end_store(store, replace(result, reported=whole))


class LoadsIntoTheTail(WriteThroughCache):
    """T15: writes the blocks that arrive to the last blocks of the load."""

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        if copy.ids:
            shift = len(copy.blocks) - arrived
            copy = replace(copy, blocks=copy.blocks[shift:])
        super().copy(copy, arrived)


class LoadsFromTheFirstBlock(WriteThroughCache):
    """T15: writes the blocks that arrive to the first blocks of the sequence."""

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        if copy.seq is not None:
            copy = replace(copy, blocks=self.tables[copy.seq][: len(copy.blocks)])
        super().copy(copy, arrived)


class ReopensInAnotherOrder(WriteThroughCache):
    """T16: takes the slots for those of its keys in another order, after a warm restart."""

    def reopen(self) -> None:
        slots = sorted(self.slot_of.values(), reverse=True)
        self.slot_of.update(zip(list(self.slot_of), slots, strict=True))


class ReopensWithFreeSlots(WriteThroughCache):
    """T16: takes the slots of all blocks for free ones after a warm restart."""

    def reopen(self) -> None:
        used = [slot for slot in self.slot_of.values() if slot not in self.slots_being_read()]
        self.free_slots = [*used, *self.free_slots]


class KeepsItsIndexWhenEmpty(WriteThroughCache):
    """T16: keeps the keys of the blocks that a restart has lost."""

    def restart_tiers(self, keep: bool) -> None:
        index = dict(self.slot_of)
        super().restart_tiers(keep)
        self.slot_of.update(index)
        if not keep:
            self.second[:] = 0
            self.free_slots = [s for s in self.free_slots if s not in index.values()]


class KeepsTheKeyOfAReusedSlot(WriteThroughCache):
    """T17: finds the former block of a slot that was given to another one."""

    def evict_slot(self, key: Hashable) -> int:
        slot = super().evict_slot(key)
        self.slot_of[key] = slot
        return slot


class ReusesASlotBeingRead(WriteThroughCache):
    """T17: stores another block in a slot from which a load still reads."""

    SLOTS = 2
    tiers = WriteThroughCache.tiers.but(keeps=2)

    def slots_being_read(self) -> set[int]:
        return set()

    def let_go(self, copy: SlotCopy) -> None:
        for block in copy.blocks:
            self.drop(block)


class KeysByTheLastBlock(WriteThroughCache):
    """T17: finds another request's block, of equal tokens after another prefix."""

    def stored_after(self, token_ids: Sequence[int], found: int) -> list[Hashable]:
        size = self.spec.block_size
        keys: list[Hashable] = []
        for end in range((found + 1) * size, len(token_ids) + 1, size):
            last = tuple(token_ids[end - size : end])
            same = [key for key in self.slot_of if isinstance(key, tuple) and key[-size:] == last]
            if not same:
                break
            keys.append(same[0])
        return keys


class ReusesABlockUnderAStore(WriteThroughCache):
    """T18: reuses blocks before their store has read them."""

    def begin(self, copy: SlotCopy) -> None:
        super().begin(copy)
        if not copy.ids:
            for block in copy.blocks:
                self.drop(block)

    def let_go(self, copy: SlotCopy) -> None:
        if copy.ids:
            super().let_go(copy)


class StoresBeforeTheWrite(WriteThroughCache):
    """T18: reads the blocks of a store before the step that fills them has run."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.early: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.last = self.keys.clone(), self.values.clone()
        super().write(seq, token_ids, key, value)

    def begin(self, copy: SlotCopy) -> None:
        if not copy.ids:
            self.early[self.num_copies] = self.last
        super().begin(copy)

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        now = self.keys, self.values
        assert isinstance(transfer.id, int)
        self.keys, self.values = self.early.pop(transfer.id, now)
        self.copy(self.copies[transfer.id], result.arrived)
        self.keys, self.values = now
        if transfer.kind == "load":
            self.copy(self.copies[transfer.id], result.arrived)
        return next(self.report(transfer.id, result) for _ in range(result.reports))


class RecoversWithTheWholePrefix(WriteThroughCache):
    """T19: goes on after a rejected load as if all tokens were there, in the keys of its blocks."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.lost: dict[int, list[int]] = {}

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        if load.seq is not None and reported < len(load.blocks):
            self.lost[load.seq] = load.ids
        return super().end_load(load, reported)

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.writing = seq
        super().write(seq, token_ids, key, value)

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        lost = self.lost.pop(self.writing, []) if token_ids else []
        super().register(table, lost if len(lost) > len(token_ids) else token_ids)

    def free(self, seq: int) -> None:
        self.lost.pop(seq, None)
        super().free(seq)


class FindsABlockBeingLoaded(WriteThroughCache):
    """S2: finds blocks from the begin of their load."""

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        ready, coming = super().load_prefix(prefix, seq)
        size = self.spec.block_size
        for at in range(ready // size, (ready + coming) // size):
            key = self.key(prefix[: (at + 1) * size])
            block = self.tables[seq][at]
            self.block_of[key], self.key_of[block] = block, key
        return ready, coming


class LoadsIntoAReusedBlock(WriteThroughCache):
    """S6: frees the blocks of a load with its sequence, before the load has written to them."""

    def free(self, seq: int) -> None:
        for each in self.copies.values():
            if each.seq == seq and each.seq is not None:
                for block in each.blocks:
                    self.drop(block)
        super().free(seq)

    def let_go(self, copy: SlotCopy) -> None:
        if copy.ids and copy.seq is None:
            copy = replace(copy, blocks=[])
        super().let_go(copy)


class DropsTwice(WriteThroughCache):
    """12: drops the references of a transfer once more when its end is reported twice."""

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        super().copy(copy, arrived)
        self.ending = copy

    def report(self, number: int, result: TransferResult) -> int | None:
        if number not in self.copies:
            for block in self.ending.blocks:
                if self.holders[block]:
                    self.drop(block)
        return super().report(number, result)


class LeaksTheSlotsOfAFullTier(WriteThroughCache):
    """S9: forgets a block for which there is no space, and keeps its slot."""

    SLOTS = 3
    tiers = WriteThroughCache.tiers.but(keeps=3)

    def end_store(self, store: SlotCopy, result: TransferResult) -> None:
        free = list(self.free_slots)
        super().end_store(store, result)
        if result.full:
            self.free_slots = free


class LeaksTheBlocksOfAFailedLoad(WriteThroughCache):
    """S9: removes the blocks of a failed load from the table, and stays their holder."""

    def end_load(self, load: SlotCopy, reported: int) -> int | None:
        if load.seq is not None and not reported:
            for block in load.blocks:
                self.hold(block)
        return super().end_load(load, reported)


class TrustsWhatArrives(ChecksumCache):
    """T14: takes a load that reports success for a right one."""

    def is_right(self, key: Hashable, block: int) -> bool:  # noqa: ARG002
        return True


class FindsWhatTheThirdTierEvicted(WriteBackCache):
    """T26: finds blocks after the last tier has evicted them, and loads others in their place."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.known: set[Hashable] = set()

    def is_below(self, key: Hashable) -> bool:
        self.known |= {*self.second, *self.third}
        return key in self.known

    def fetch(self, key: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        if super().is_below(key):
            return super().fetch(key)
        return next(reversed([*self.second.values(), *self.third.values()]))


class ShowsAStoreInFlight(WriteBackCache):
    """T14: finds blocks from the begin of their store, before their data is there."""

    def begin(self, move: Descent | Ascent) -> None:
        super().begin(move)
        if isinstance(move, Descent) and move.blocks:
            zeros = torch.zeros_like(move.rows[0]), torch.zeros_like(move.rows[1])
            self.second[move.key] = zeros


class StoresAfterTheEviction(WriteBackCache):
    """20: reads the data of an evicted block when its store ends, after others wrote to it."""

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        assert isinstance(transfer.id, int)
        move = self.moving[transfer.id]
        if isinstance(move, Descent) and move.blocks:
            move.rows = self.read(move.blocks[0])
        return super().end_transfer(transfer, result)


class LoadsInAnotherOrder(WriteBackCache):
    """S8: writes the blocks of a load in the order in which they were stored."""

    def ascend(self, move: Ascent, arrived: int) -> int | None:
        order = {id(rows): at for at, rows in enumerate(self.second.values())}
        last = len(order)
        move.rows.sort(key=lambda rows: order.get(id(rows), last))
        return super().ascend(move, arrived)


class LoadsOneLayer(WriteBackCache):
    """S8: loads the keys and values of the first layer only."""

    def ascend(self, move: Ascent, arrived: int) -> int | None:
        rest = self.keys[1:].clone(), self.values[1:].clone()
        answer = super().ascend(move, arrived)
        self.keys[1:], self.values[1:] = rest
        return answer


BROKEN = (
    CountsAFailedLoad,
    ShowsAFailedStore,
    CountsAPartAsTheWhole,
    StoresAPartAsTheWhole,
    LoadsIntoTheTail,
    LoadsFromTheFirstBlock,
    ReopensInAnotherOrder,
    ReopensWithFreeSlots,
    KeepsItsIndexWhenEmpty,
    KeepsTheKeyOfAReusedSlot,
    ReusesASlotBeingRead,
    KeysByTheLastBlock,
    ReusesABlockUnderAStore,
    StoresBeforeTheWrite,
    RecoversWithTheWholePrefix,
    FindsABlockBeingLoaded,
    LoadsIntoAReusedBlock,
    DropsTwice,
    LeaksTheSlotsOfAFullTier,
    LeaksTheBlocksOfAFailedLoad,
    TrustsWhatArrives,
    FindsWhatTheThirdTierEvicted,
    ShowsAStoreInFlight,
    StoresAfterTheEviction,
    LoadsInAnotherOrder,
    LoadsOneLayer,
)
