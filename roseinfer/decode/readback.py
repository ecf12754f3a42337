"""Copying numbers from the device to the host while the device goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_Buffer = tuple["torch.Tensor", "torch.cuda.Event | None"]
"""Pinned memory, and the event behind the last copy to it; None where copying waits for it."""


@dataclass(slots=True)
class Arrival:
    """A copy of a tensor that may still be under way."""

    _buffer: _Buffer
    _count: int
    _release: Callable[[_Buffer], None]

    def wait(self) -> list[Any]:
        """Wait for the numbers and return them. This may be called once."""
        host, done = self._buffer
        if done is not None:
            done.synchronize()
        values: list[Any] = host[: self._count].tolist()
        self._release(self._buffer)
        return values


class Readback:
    """Copies vectors of up to ``most`` numbers through pinned buffers, which are used again."""

    def __init__(self, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self._most = most
        self._dtype = dtype
        self._transfers = transfers.Transfers(device)
        self._buffers: list[_Buffer] = []

    def start(self, vector: torch.Tensor) -> Arrival:
        """Start copying ``vector`` as it is now, whatever it is changed to later."""
        buffer = self._buffers.pop() if self._buffers else self._new_buffer()
        host, done = buffer
        count = len(vector)
        host[:count].copy_(vector, non_blocking=True)
        if done is not None:
            done.record(self._transfers.stream())
        return Arrival(buffer, count, self._buffers.append)

    def _new_buffer(self) -> _Buffer:
        host = self._transfers.host_buffer([self._most], self._dtype)
        return host, self._transfers.event() if self._transfers.late else None
