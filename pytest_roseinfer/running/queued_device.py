"""The device of a cache that takes a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.device_queue import DeviceQueue
from pytest_roseinfer.cases.operations.operation import Device

if TYPE_CHECKING:
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

    def hand_over(self, *tensors: torch.Tensor) -> None:
        self._queue.on_device(*tensors)

    def overwrite(self, tensor: torch.Tensor, value: float) -> None:
        self._queue.submit(lambda: tensor.fill_(value))
