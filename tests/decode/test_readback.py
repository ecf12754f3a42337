"""Asynchronous copies to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer.decode.readback import Readback


def readback(device: str, dtype: torch.dtype = torch.int64) -> Readback:
    return Readback(4, dtype, torch.device(device))


@pytest.mark.parametrize("count", [1, 3, 4])
def test_numbers_arrive(device: str, count: int) -> None:
    vector = torch.arange(10, 10 + count, device=device)
    assert readback(device).start(vector).wait() == list(range(10, 10 + count))


def test_fractions_arrive(device: str) -> None:
    vector = torch.tensor([0.5, -0.25], device=device)
    assert readback(device, torch.float32).start(vector).wait() == [0.5, -0.25]


def test_a_view_with_steps_arrives(device: str) -> None:
    assert readback(device).start(torch.arange(8, device=device)[::2]).wait() == [0, 2, 4, 6]


def test_what_changes_later_does_not_arrive(device: str) -> None:
    numbers = readback(device)
    vector = torch.tensor([1, 2], device=device)
    first = numbers.start(vector)
    vector += 10
    second = numbers.start(vector)
    vector += 100
    assert second.wait() == [11, 12]
    assert first.wait() == [1, 2]


def test_buffers_are_used_again_and_never_while_something_is_on_its_way(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    real = Readback._new_buffer

    def counted(self: Readback) -> Any:
        buffer = real(self)
        made.append(buffer[0])
        return buffer

    monkeypatch.setattr(Readback, "_new_buffer", counted)
    numbers = readback(device)
    for turn in range(6):
        on_their_way = [
            numbers.start(torch.full((2,), turn * 10 + at, device=device)) for at in range(3)
        ]
        found = [each.wait()[0] for each in on_their_way]
        assert found == [turn * 10, turn * 10 + 1, turn * 10 + 2]
    assert len(made) == 3
    assert all(buffer.is_pinned() for buffer in made) or device == "cpu"
