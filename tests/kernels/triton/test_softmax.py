"""Parts of a context depend on position alone, and agree on the host and in kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from roseinfer.kernels.triton.softmax import num_context_parts, part_begin, part_index

EDGES = [edge + by for edge in (128, 2048, 4096, 8192, 131072, 1 << 24) for by in (-1, 0, 1)]


@triton.jit
def _look(positions, numbers, begins):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    part = part_index(tl.load(positions + at))
    tl.store(numbers + at, part)
    tl.store(begins + at, part_begin(part))
    tl.store(begins + tl.num_programs(0) + at, part_begin(part + 1))


def looked_up(positions: list[int], device: str) -> list[tuple[int, int, int]]:
    """Return each position's part, with its begin and end, as computed in a kernel."""
    at = torch.tensor(positions, dtype=torch.int32, device=device)
    numbers, begins = torch.zeros_like(at), at.new_zeros((2, len(at)))
    _look[(len(at),)](at, numbers, begins)
    return list(zip(numbers.tolist(), *begins.tolist(), strict=True))


def test_a_position_lies_in_its_part_on_the_host_too(device: str) -> None:
    positions = [0, 1, *EDGES]
    for position, (part, begin, end) in zip(positions, looked_up(positions, device), strict=True):
        assert begin <= position < end
        assert part == num_context_parts(position + 1) - 1


def test_parts_are_small_beside_the_context_and_few(device: str) -> None:
    for position, (part, begin, end) in zip(EDGES, looked_up(EDGES, device), strict=True):
        assert end - begin <= max(128, (position + 1) / 16)
        assert part < 33 + 16 * max(0, (position // 4096).bit_length())


@pytest.mark.sampled_cases
@pytest.mark.parametrize("window", [1, 100, 128, 129, 1000])
def test_a_window_sees_no_more_parts_than_are_said(device: str, window: int) -> None:
    last = list(range(0, 20_000, 97))
    first = [max(0, position - window + 1) for position in last]
    ends, begins = looked_up(last, device), looked_up(first, device)
    for position, (end, *_), (begin, *_) in zip(last, ends, begins, strict=True):
        assert end - begin + 1 <= num_context_parts(position + 1, window)
