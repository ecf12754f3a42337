"""Caches that call torch as on a GPU, for the simulated device: right ones, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.capabilities.simulated_device import Event
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec, DeviceQueue

_BUFFERS = 2
_MAX_ROWS = 1024


class TorchOnAQueue(PagedCache):
    """Stages slots in pinned memory, and gathers to pinned memory."""

    gather_in_flight = True

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.staging = torch.zeros((_BUFFERS, 2, _MAX_ROWS), dtype=torch.int64)
        self.device_slots = torch.zeros((_BUFFERS, 2, _MAX_ROWS), dtype=torch.int64)
        """Slots on the device."""
        self.copied = [Event() for _ in range(_BUFFERS)]
        self.staged = 0

    def use_queue(self, queue: DeviceQueue) -> None:
        self.queue = queue
        queue.on_device(self.keys, self.values, self.device_slots)
        queue.pinned(self.staging)

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        same_position = len(blocks) > 1 and len(set(positions)) == 1
        self.counts["all_rows" if same_position else "row_by_row"] += 1
        at, rows = self.staged % _BUFFERS, len(blocks)
        self.staged += 1
        self.wait_for_buffer(at)
        self.staging[at, :, :rows] = torch.tensor([blocks, positions])
        self.device_slots[at].copy_(self.staging[at], non_blocking=True)
        self.copied[at].record(self.queue)
        target = self.device_slots[at, :, :rows].unbind(0)
        for cache, new in ((self.keys, key), (self.values, value)):
            cache.transpose(2, 3).transpose(0, 1).transpose(1, 2).index_put_(
                target, new.to(cache.dtype).transpose(0, 1)
            )

    def wait_for_buffer(self, at: int) -> None:
        self.copied[at].synchronize()

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.full((2, *self.peek(seq, layer)[0].shape), float("nan"), dtype=self.keys.dtype)
        for target, stored in zip(host, self.peek(seq, layer), strict=True):
            target.copy_(stored, non_blocking=True)
        self.wait_for(self.queue.record_event())
        return host[0], host[1]

    def wait_for(self, arrived: Event) -> None:
        arrived.synchronize()


class RefillsTheBufferEarly(TorchOnAQueue):
    """Fills pinned memory that the device has not read yet."""

    def wait_for_buffer(self, at: int) -> None: ...


class ReturnsBeforeTheCopy(TorchOnAQueue):
    """Returns pinned memory that the device has not written yet."""

    def wait_for(self, arrived: Event) -> None: ...


class RecordsTheCopyBeforeIt(TorchOnAQueue):
    """Records the event of a copy before it queues the copy."""

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        early = self.queue.record_event()
        at = self.staged % _BUFFERS
        super().write(blocks, positions, key, value)
        self.copied[at] = early


class GathersOnAnotherStream(TorchOnAQueue):
    """Gathers on a stream of its own. It is right."""

    def use_queue(self, queue: DeviceQueue) -> None:
        super().use_queue(queue)
        self.copies = queue.new_stream()

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.wait_for_writers()
        with self.queue.using(self.copies):
            return super().gather(seq, layer)

    def wait_for_writers(self) -> None:
        self.copies.wait_event(self.queue.record_event())

    def wait_for(self, arrived: Event) -> None:  # noqa: ARG002
        self.copies.synchronize()


class GathersDuringWrites(GathersOnAnotherStream):
    """S7: gathers blocks while writes to them are pending."""

    def wait_for_writers(self) -> None: ...


BROKEN = (RefillsTheBufferEarly, ReturnsBeforeTheCopy, RecordsTheCopyBeforeIt, GathersDuringWrites)
