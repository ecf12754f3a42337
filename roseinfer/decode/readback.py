"""Numbers on their way from the device to the host, while the device goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Arrival:
    """A copy of a tensor that is not there yet."""

    _host: torch.Tensor
    _count: int
    _done: torch.cuda.Event | None
    _release: Callable[[torch.Tensor], None]

    def wait(self) -> list[Any]:
        """The numbers. May be asked for once."""
        if self._done is not None:
            self._done.synchronize()
        values: list[Any] = self._host[: self._count].tolist()
        self._release(self._host)
        return values


class Readback:
    """Copies vectors of up to ``most`` numbers, through pinned buffers that are used again."""

    def __init__(self, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self._most = most
        self._dtype = dtype
        self._on_gpu = device.type == "cuda"
        self._buffers: list[torch.Tensor] = []

    def start(self, vector: torch.Tensor) -> Arrival:
        """What is changed in ``vector`` from now on does not arrive."""
        host = self._buffers.pop() if self._buffers else self._new_buffer()
        host[: len(vector)].copy_(vector, non_blocking=True)
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(vector.device))
        return Arrival(host, len(vector), done, self._buffers.append)

    def _new_buffer(self) -> torch.Tensor:
        return torch.empty(self._most, dtype=self._dtype, pin_memory=self._on_gpu)
