"""Copies between host and device on a simulated device that runs late."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from pytest_roseinfer.capabilities.simulated_device import Event
from roseinfer.kv import storage, transfers
from roseinfer.kv.transfers import outside_inference_mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer import DeviceQueue


class LateTransfers(transfers.Transfers):
    """Transfers whose pinned buffers, device buffers and events belong to a device queue."""

    def __init__(self, queue: DeviceQueue, device: torch.device) -> None:
        super().__init__(device)
        self.is_async = True
        self.stream = lambda: queue  # type: ignore[assignment,return-value]
        self._queue = queue

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with outside_inference_mode():
            buffer = torch.zeros(tuple(shape), dtype=dtype)
        self._queue.pinned(buffer)
        return buffer

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        with outside_inference_mode():
            buffer = torch.zeros_like(host)
        self._queue.on_device(buffer)
        return buffer

    def event(self) -> torch.cuda.Event:
        return Event()  # type: ignore[return-value]


@contextmanager
def late_transfers(queue: DeviceQueue, ring: int) -> Iterator[None]:
    """Make caches built in the context copy late, and stage indices in ``ring`` buffers."""
    with (
        patch.object(transfers, "Transfers", partial(LateTransfers, queue)),
        patch.object(storage, "_NUM_RING_BUFFERS", ring),
    ):
        yield
