"""Asynchronous copies to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from roseinfer.kv.transfers import Readback
from tests.late_transfers import late_transfers


def readback(device: str, dtype: torch.dtype = torch.int64) -> Readback:
    return Readback(4, dtype, torch.device(device))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_integers_are_read_back(device: str, count: int) -> None:
    vector = torch.arange(10, 10 + count, device=device)
    assert readback(device).start(vector).wait() == list(range(10, 10 + count))


def test_floats_are_read_back(device: str) -> None:
    vector = torch.tensor([0.5, -0.25], device=device)
    assert readback(device, torch.float32).start(vector).wait() == [0.5, -0.25]


def test_strided_view_is_read_back(device: str) -> None:
    assert readback(device).start(torch.arange(8, device=device)[::2]).wait() == [0, 2, 4, 6]


def test_later_changes_are_not_read_back(device: str) -> None:
    numbers = readback(device)
    vector = torch.tensor([1, 2], device=device)
    first = numbers.start(vector)
    vector += 10
    second = numbers.start(vector)
    vector += 100
    assert second.wait() == [11, 12]
    assert first.wait() == [1, 2]


def test_buffers_are_reused_unless_in_flight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[torch.Tensor] = []
    real = Readback._new_buffer

    def recorded_new_buffer(self: Readback) -> Any:
        buffer = real(self)
        buffers.append(buffer[0])
        return buffer

    monkeypatch.setattr(Readback, "_new_buffer", recorded_new_buffer)
    numbers = readback(device)
    for turn in range(6):
        in_flight = [
            numbers.start(torch.full((2,), turn * 10 + at, device=device)) for at in range(3)
        ]
        values = [each.wait()[0] for each in in_flight]
        assert values == [turn * 10, turn * 10 + 1, turn * 10 + 2]
    assert len(buffers) == 3
    assert all(buffer.is_pinned() for buffer in buffers) or device == "cpu"


def test_host_waits_for_its_own_copy_alone() -> None:
    """A buffer that is used again has an event of its own copy, too."""
    queue = DeviceQueue()
    with late_transfers(queue, 2):
        numbers = readback("cpu")
    vector = torch.tensor([1, 2])
    queue.on_device(vector)
    with QueuedTorch(queue):
        for turn in range(2):
            vector += 10
            copies = [numbers.start(vector) for _ in range(2)]
            queued = queue.num_submitted
            vector += 100
            assert copies[0].wait() == copies[1].wait() == [11 + 110 * turn, 12 + 110 * turn]
            assert queue.num_started == queued
