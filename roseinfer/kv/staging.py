"""Index tensors for the write paths, reused for as long as the manager lives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.errors import BadArgument, StalePlan
from roseinfer.kv.lasting import lasting
from roseinfer.kv.work import Work

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

_SLOTS = 64
_FIRST_CAPACITY = 256
_SPARE = 3
"""What starting each of three columns on 16 bytes can cost."""
_MOST_IN_RING = 1 << 14
"""Most indices that go through the ring: 8 MiB of it. A prompt of thousands goes apart."""
_MOST_SHAPES = 8
"""Lengths for which a slot remembers its views; decoding needs one or two."""


@dataclass(frozen=True, slots=True)
class StagedIndices:
    """Columns of indices on the device, good until the ring comes round again."""

    columns: tuple[torch.Tensor, ...]
    ring: IndexStaging
    ticket: int | None
    """Which turn of the ring this was; None for buffers of its own."""

    def check_usable(self, ring: IndexStaging) -> None:
        """Raise unless the columns are ``ring``'s and still hold what was staged."""
        if self.ring is not ring:
            raise BadArgument("the plan was made by another cache")
        if self.ticket is not None and ring.tickets - self.ticket >= _SLOTS:
            raise StalePlan(
                f"this plan's indices were overwritten: {ring.tickets - self.ticket} plans "
                f"were made after it and at most {_SLOTS - 1} may be; write a plan before "
                "making many more"
            )


@dataclass(frozen=True, slots=True)
class _Views:
    """One slot of the ring as columns of one length: where to fill, copy and read."""

    begins: tuple[int, ...]
    source: torch.Tensor
    target: torch.Tensor
    columns: tuple[torch.Tensor, ...]


class IndexStaging:
    """A ring of index buffers: filled on the host, copied to the device, then reused.

    On a GPU the host side is pinned and copies are asynchronous, so a buffer must not be
    rewritten while a copy from it is in flight. One event per half of the ring guards
    that: it is recorded when the half is full and waited for when the half is entered
    again, which costs nothing as long as the device is less than half a ring behind. All
    copies are made on the caller's current stream, in the order the plans are written.
    """

    def __init__(self, device: torch.device, work_counts: Counter[str]) -> None:
        self._device = device
        self._work_counts = work_counts
        self._on_gpu = device.type == "cuda"
        self.tickets = 0
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        # Plans already staged keep the old buffers alive through their columns.
        self._capacity = capacity
        with lasting():
            host = torch.empty((_SLOTS, capacity), dtype=torch.int64, pin_memory=self._on_gpu)
            device = torch.empty_like(host, device=self._device) if self._on_gpu else host
        self._hosts, self._devices = host.unbind(0), device.unbind(0)
        self._memory = memoryview(host.numpy().data).cast("B").cast("q")
        self._views: list[dict[tuple[int, int], _Views]] = [{} for _ in range(_SLOTS)]
        self._half_done: list[torch.cuda.Event | None] = [None, None]

    def stage(self, columns: Sequence[list[int]]) -> StagedIndices:
        """Put columns of equal length on the device with a single copy."""
        length = len(columns[0])
        self._work_counts[Work.STAGED_INDICES] += length * len(columns)
        if length * len(columns) > _MOST_IN_RING:
            return StagedIndices(self._stage_apart(columns), self, None)
        views = self._slot_views(self._next_slot(length * len(columns)), length, len(columns))
        for begin, column in zip(views.begins, columns, strict=True):
            self._memory[begin : begin + length] = array("q", column)
        if self._on_gpu:
            views.target.copy_(views.source, non_blocking=True)
        return StagedIndices(views.columns, self, self.tickets)

    def _stage_apart(self, columns: Sequence[list[int]]) -> tuple[torch.Tensor, ...]:
        """Buffers of their own for a long prompt, which must not swell all of the ring."""
        host = torch.tensor(columns, dtype=torch.int64, pin_memory=self._on_gpu)
        return host.to(self._device, non_blocking=True).unbind(0)

    def _slot_views(self, slot: int, length: int, columns: int) -> _Views:
        known = self._views[slot]
        views = known.get((length, columns))
        if views is None:
            if len(known) >= _MOST_SHAPES:
                known.clear()
            views = known[length, columns] = self._make_views(slot, length, columns)
        return views

    def _make_views(self, slot: int, length: int, columns: int) -> _Views:
        pitch = _pitch(length)
        total = pitch * columns
        host, device = self._hosts[slot], self._devices[slot]
        return _Views(
            tuple(slot * self._capacity + at for at in range(0, total, pitch)),
            host[:total],
            device[:total],
            tuple(device[at : at + length] for at in range(0, total, pitch)),
        )

    def _next_slot(self, size: int) -> int:
        if size + _SPARE > self._capacity:
            self._allocate(1 << (size + _SPARE - 1).bit_length())
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


def _pitch(length: int) -> int:
    """Distance of columns: they start on 16 bytes, as compiled kernels like it."""
    return length + length % 2
