"""Caches that call torch as on a GPU, and are run on a simulated one: one right, others not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.capabilities.simulated_device import Event
from tests.capabilities.caches.paged_cache import PagedCache

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec, DeviceQueue

_BUFFERS = 2
_MOST_ROWS = 1024


class TorchOnAQueue(PagedCache):
    """It stages where tokens go in pinned memory, and gathers to pinned memory."""

    gather_in_flight = True

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.staging = torch.zeros((_BUFFERS, 2, _MOST_ROWS), dtype=torch.int64)
        self.places = torch.zeros((_BUFFERS, 2, _MOST_ROWS), dtype=torch.int64)
        """The same on the device."""
        self.copied = [Event() for _ in range(_BUFFERS)]
        self.staged = 0

    def use_queue(self, queue: DeviceQueue) -> None:
        self.queue = queue
        queue.on_device(self.keys, self.values, self.places)
        queue.pinned(self.staging)

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        alike = len(blocks) > 1 and len(set(positions)) == 1
        self.counts["all_rows" if alike else "row_by_row"] += 1
        at, rows = self.staged % _BUFFERS, len(blocks)
        self.staged += 1
        self.wait_for_buffer(at)
        self.staging[at, :, :rows] = torch.tensor([blocks, positions])
        self.places[at].copy_(self.staging[at], non_blocking=True)
        self.copied[at].record(self.queue)
        to = self.places[at, :, :rows].unbind(0)
        for cache, new in ((self.keys, key), (self.values, value)):
            cache.transpose(2, 3).transpose(0, 1).transpose(1, 2).index_put_(
                to, new.to(cache.dtype).transpose(0, 1)
            )

    def wait_for_buffer(self, at: int) -> None:
        self.copied[at].synchronize()

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.full((2, *self.peek(seq, layer)[0].shape), float("nan"), dtype=self.keys.dtype)
        for to, stored in zip(host, self.peek(seq, layer), strict=True):
            to.copy_(stored, non_blocking=True)
        self.wait_for(self.queue.record_event())
        return host[0], host[1]

    def wait_for(self, arrived: Event) -> None:
        arrived.synchronize()


class RefillsTheBufferEarly(TorchOnAQueue):
    """It fills pinned memory that the device has not read yet."""

    def wait_for_buffer(self, at: int) -> None: ...


class ReturnsBeforeTheCopy(TorchOnAQueue):
    """It returns pinned memory to which the device has not copied yet."""

    def wait_for(self, arrived: Event) -> None: ...


class TellsTooEarly(TorchOnAQueue):
    """It marks a copy as done that it asks for after that."""

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        early = self.queue.record_event()
        at = self.staged % _BUFFERS
        super().write(blocks, positions, key, value)
        self.copied[at] = early


class CopiesOutBeside(TorchOnAQueue):
    """It gathers on a stream of its own. It is right."""

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


class CopiesOutUnderAWriter(CopiesOutBeside):
    """S7: it copies blocks out while tokens are on their way to them."""

    def wait_for_writers(self) -> None: ...


BROKEN = (RefillsTheBufferEarly, ReturnsBeforeTheCopy, TellsTooEarly, CopiesOutUnderAWriter)
