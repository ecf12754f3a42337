"""Caches that swap to a store in host memory on streams of their own: a right one, broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.capabilities.caches.swap_cache import SwapCache, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec, DeviceQueue
    from pytest_roseinfer.capabilities.simulated_device import Event


class StoredCache(SwapCache):
    """Copies to pinned host memory on one stream, and back on another. It is right."""

    standard_bad_calls: ClassVar[Sequence[str]] = ()

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.copied: dict[int, Event] = {}
        """Event after the latest copy of each sequence, out of the cache or back."""

    def use_queue(self, queue: DeviceQueue) -> None:
        self.queue = queue
        self.stores, self.loads = queue.new_stream(), queue.new_stream()
        queue.on_device(self.keys, self.values)
        self.register_store()

    def register_store(self) -> None:
        self.queue.pinned(self.space_keys, self.space_values)

    def swap_out(self, seq: int) -> object:
        super().swap_out(seq)
        leaving = self.transfers[seq]
        self.wait_for_writes()
        with self.queue.using(self.stores):
            for block, slot in zip(leaving.blocks, leaving.space, strict=True):
                self.space_keys[:, slot].copy_(self.keys[:, block], non_blocking=True)
                self.space_values[:, slot].copy_(self.values[:, block], non_blocking=True)
        self.copied[seq] = self.stores.record_event()
        return leaving

    def wait_for_writes(self) -> None:
        """Let the store wait for the writes so far, and for the loads that these waited for."""
        self.stores.wait_event(self.queue.record_event())

    def finish_swap_out(self, leaving: Any) -> None:
        self.wait_for_copy(leaving.seq)
        self.give_back(leaving)

    def wait_for_copy(self, seq: int) -> None:
        """Let later writes wait until a sequence is copied; the host does not wait."""
        self.queue.wait_event(self.copied[seq])

    def swap_in(self, seq: int) -> object:
        super().swap_in(seq)
        coming = self.transfers[seq]
        self.loads.wait_event(self.queue.record_event())
        with self.queue.using(self.loads):
            self.load(coming)
        self.copied[seq] = self.loads.record_event()
        return coming

    def load(self, coming: Transfer) -> None:
        for block, slot in zip(coming.blocks, coming.space, strict=True):
            self.keys[:, block].copy_(self.space_keys[:, slot], non_blocking=True)
            self.values[:, block].copy_(self.space_values[:, slot], non_blocking=True)

    def finish_swap_in(self, coming: Any) -> None:
        self.wait_for_copy(coming.seq)
        super().finish_swap_in(coming)

    def copy_in(self, coming: Transfer) -> None:
        """Do nothing, as the copy was submitted before."""

    def free(self, seq: int) -> None:
        if seq in self.transfers:
            self.wait_for_copy(seq)
        super().free(seq)


class LoadsWithoutAPin(StoredCache):
    """S7: returns the slots of a sequence to the store before its load from them is done."""

    def swap_in(self, seq: int) -> object:
        super().swap_in(seq)
        coming = self.transfers[seq]
        self.space += coming.space
        coming.space = []
        return coming


class LoadsFromPageableMemory(StoredCache):
    """S7: loads from memory that is not pinned, and so is read before the store wrote to it."""

    def register_store(self) -> None: ...


class LoadsFromOneBuffer(StoredCache):
    """S7: loads all blocks through one pinned buffer, without waiting until it was read."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.buffer = torch.zeros_like(self.space_keys[:, 0])

    def register_store(self) -> None:
        super().register_store()
        self.queue.pinned(self.buffer)

    def load(self, coming: Transfer) -> None:
        self.copied[coming.seq].synchronize()
        for block, slot in zip(coming.blocks, coming.space, strict=True):
            for cache, space in ((self.keys, self.space_keys), (self.values, self.space_values)):
                self.buffer.copy_(space[:, slot])
                cache[:, block].copy_(self.buffer, non_blocking=True)


class StoresDuringWrites(StoredCache):
    """S7: does not let the store wait for the stream that writes."""

    def wait_for_writes(self) -> None: ...


class WritesDuringCopies(StoredCache):
    """S7: does not let the stream that writes wait for the store or the load."""

    def wait_for_copy(self, seq: int) -> None: ...


class FreesDuringALoad(StoredCache):
    """S7: frees the blocks of a sequence that is cancelled while it is loaded."""

    def free(self, seq: int) -> None:
        SwapCache.free(self, seq)


BROKEN = (
    LoadsWithoutAPin,
    LoadsFromPageableMemory,
    LoadsFromOneBuffer,
    StoresDuringWrites,
    WritesDuringCopies,
    FreesDuringALoad,
)
