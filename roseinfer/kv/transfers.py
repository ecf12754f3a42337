"""Asynchronous copies between host and device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
