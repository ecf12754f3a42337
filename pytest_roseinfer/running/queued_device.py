"""The device of a cache that takes a queue."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.device_queue import DeviceQueue
from pytest_roseinfer.cases.operations.operation import Device
from pytest_roseinfer.running.queued_torch import QueuedTorch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter


class QueuedDevice(Device):
    """It makes the calls that it is asked for when it is waited for, or told to."""

    def __init__(self, adapter: KVCacheAdapter) -> None:
        self._queue = DeviceQueue()
        adapter.use_queue(self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue.in_flight

    def run(self, count: int, stream: int) -> None:
        self._queue.run(count, stream)

    def finish(self) -> None:
        self._queue.finish()

    def working(self) -> AbstractContextManager[object]:
        return QueuedTorch(self._queue) if self._queue.has_memory else nullcontext()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        if self._queue.has_memory:
            self._queue.on_device(*tensors)

    def overwrite(self, tensor: torch.Tensor) -> None:
        if self.idle:  # so that a cache that asks for nothing has nothing in flight
            super().overwrite(tensor)
        else:
            self._queue.submit(partial(super().overwrite, tensor))
