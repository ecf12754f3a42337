"""Asynchronous copies between host and device: uploads, and readbacks of small vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence


outside_inference_mode = partial(torch.inference_mode, mode=False)
"""Context in which tensors are made that may be written to in any mode.

A tensor made in inference mode could only be written to in inference mode, and a buffer is made or
grown at its first use, whatever the mode there.
"""


class Transfers:
    """Factory of buffers and events for asynchronous copies.

    Everything that must not be touched before a copy is done is guarded by an event made here, so
    that tests can substitute a simulated device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        """True if copies are asynchronous; if False, no events are used."""
        # An attribute, not a method: it saves a Python call per step, and so per token.
        self.stream: Callable[[], torch.cuda.Stream] = partial(torch.cuda.current_stream, device)
        """Callable that returns the caller's current stream, on which events are recorded."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a host buffer, pinned where copies are asynchronous."""
        with outside_inference_mode():
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.is_async)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        """Make the device side of a host buffer; ``host`` itself where copies are synchronous."""
        with outside_inference_mode():
            return torch.empty_like(host, device=self.device) if self.is_async else host

    def upload_columns(
        self, columns: Sequence[Sequence[float] | array[int]], dtype: torch.dtype
    ) -> torch.Tensor:
        """Upload columns of equal length to new device memory, without waiting.

        ``torch.tensor(..., device=...)`` waits until the device has done all work queued on it.
        """
        host = self.host_buffer((len(columns), len(columns[0])), dtype)
        for memory, column in zip(host.numpy(), columns, strict=True):
            memory[:] = column
        uploaded = self.device_buffer(host)
        if self.is_async:  # torch does not reuse the pinned memory until this copy is done
            uploaded.copy_(host, non_blocking=True)
        return uploaded

    def event(self) -> torch.cuda.Event:
        """Make an event that counts as completed until it is recorded."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


# Readback of small vectors.


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
    """Copier of vectors of at most ``max_length`` numbers through reused pinned buffers."""

    def __init__(self, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = max_length
        self._dtype = dtype
        self._transfers = Transfers(device)
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
