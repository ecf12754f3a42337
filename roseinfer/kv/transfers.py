"""Copies between host and device for which the host does not wait."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

# Tensors that outlive the call that makes them.


lasting = partial(torch.inference_mode, mode=False)
"""In this context tensors are made that may be written to at any time.

One made in inference mode could be written to in inference mode alone, and a buffer is made or
grown wherever its first use happens to be.
"""


class Transfers:
    """What such copies take: memory on either side, and events that say which of them are done.

    Everything that must not be touched before a copy is done is guarded by an event from here, so
    that tests can put a simulated device in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.late = device.type == "cuda"
        """Copies happen later than they are asked for. If not, there are no events."""
        # No method: a call more in every step is a call more in every token.
        self.stream: Callable[[], torch.cuda.Stream] = partial(torch.cuda.current_stream, device)
        """The caller's stream, behind whose work an event is recorded."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a buffer on the host, pinned so that copies of it can be late."""
        with lasting():
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.late)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        """Make the device's side of a buffer, which is the same where nothing is late."""
        with lasting():
            return torch.empty_like(host, device=self.device) if self.late else host

    def bring(
        self, columns: Sequence[Sequence[float] | array[int]], dtype: torch.dtype
    ) -> torch.Tensor:
        """Put columns of equal length on the device, in memory of their own, without waiting.

        ``torch.tensor(..., device=...)`` waits until the device has done all that it was asked for.
        """
        host = self.host_buffer((len(columns), len(columns[0])), dtype)
        for memory, column in zip(host.numpy(), columns, strict=True):
            memory[:] = column
        brought = self.device_buffer(host)
        if self.late:  # torch keeps pinned memory from others until such a copy is done
            brought.copy_(host, non_blocking=True)
        return brought

    def event(self) -> torch.cuda.Event:
        """Make an event that counts as done until it is recorded."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
