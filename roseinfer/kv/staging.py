"""Index tensors for the write paths, reused for as long as the manager lives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.errors import StalePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

_SLOTS = 64
_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class StagedIndices:
    """Columns of indices on the device, good until the ring comes round again."""

    columns: tuple[torch.Tensor, ...]
    ring: IndexStaging
    ticket: int

    def check_current(self) -> None:
        if self.ring.tickets - self.ticket >= _SLOTS:
            raise StalePlan(
                f"this plan's indices were overwritten: {self.ring.tickets - self.ticket} plans "
                f"were made after it and at most {_SLOTS - 1} may be; write a plan before "
                "making many more"
            )


class IndexStaging:
    """A ring of index buffers: filled on the host, copied to the device, then reused.

    On a GPU the host side is pinned and copies are asynchronous, so a buffer must not be
    rewritten while a copy from it is in flight. One event per half of the ring guards
    that: it is recorded when the half is full and waited for when the half is entered
    again, which costs nothing as long as the device is less than half a ring behind. All
    copies are made on the caller's current stream, in the order the plans are written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.tickets = 0
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        # Plans already staged keep the old buffers alive through their columns.
        self._capacity = capacity
        self._host = torch.empty((_SLOTS, capacity), dtype=torch.int64, pin_memory=self._on_gpu)
        self._view = memoryview(self._host.numpy().data).cast("B").cast("q")
        self._target = (
            torch.empty_like(self._host, device=self._device) if self._on_gpu else self._host
        )
        self._half_done: list[torch.cuda.Event | None] = [None, None]

    def stage(self, columns: Sequence[list[int]]) -> StagedIndices:
        """Put columns of equal length on the device with a single copy."""
        length = len(columns[0])
        pitch = length + length % 2  # columns start on 16 bytes, as compiled kernels like it
        total = pitch * len(columns)
        if total > self._capacity:
            self._allocate(1 << (total - 1).bit_length())
        slot = self._next_slot()
        begin = slot * self._capacity
        for column in columns:
            self._view[begin : begin + length] = array("q", column)
            begin += pitch
        target = self._target[slot]
        if self._on_gpu:
            target[:total].copy_(self._host[slot, :total], non_blocking=True)
        views = tuple(target[at : at + length] for at in range(0, total, pitch))
        return StagedIndices(views, self, self.tickets)

    def _next_slot(self) -> int:
        self.tickets += 1
        slot = self.tickets % _SLOTS
        if self._on_gpu and slot % (_SLOTS // 2) == 0:
            self._enter_half(slot // (_SLOTS // 2))
        return slot

    def _enter_half(self, half: int) -> None:
        left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        left.record(torch.cuda.current_stream(self._device))
        self._half_done[1 - half] = left
        entered = self._half_done[half]
        if entered is not None:
            entered.synchronize()
