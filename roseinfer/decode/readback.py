"""Asynchronous copies of small vectors from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_Buffer = tuple["torch.Tensor", "torch.cuda.Event | None"]
"""Pinned memory and the event recorded after the last copy to it; None if copies block."""


@dataclass(slots=True)
class PendingReadback:
    """Copy of a tensor that may still be in flight."""

    _buffer: _Buffer
    _count: int
    _release: Callable[[_Buffer], None]

    def wait(self) -> list[Any]:
        """Wait for the copy and return its numbers. May be called once."""
        host, done = self._buffer
        if done is not None:
            done.synchronize()
        values: list[Any] = host[: self._count].tolist()
        self._release(self._buffer)
        return values


class Readback:
    """Copier of vectors of at most ``most`` numbers through reused pinned buffers."""

    def __init__(self, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = most
        self._dtype = dtype
        self._transfers = transfers.Transfers(device)
        self._buffers: list[_Buffer] = []

    def start(self, vector: torch.Tensor) -> PendingReadback:
        """Start copying ``vector`` as it is now; later writes to it do not affect the copy."""
        buffer = self._buffers.pop() if self._buffers else self._new_buffer()
        host, done = buffer
        count = len(vector)
        host[:count].copy_(vector, non_blocking=True)
        if done is not None:
            done.record(self._transfers.stream())
        return PendingReadback(buffer, count, self._buffers.append)

    def _new_buffer(self) -> _Buffer:
        host = self._transfers.host_buffer([self._max_length], self._dtype)
        return host, self._transfers.event() if self._transfers.is_async else None
