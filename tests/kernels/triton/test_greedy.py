"""The end of a greedy step against torch's argmax: the same tokens, whatever the logits are."""

from __future__ import annotations

import pytest
import torch

from roseinfer import SamplingParams
from roseinfer.kernels.triton.greedy import argmax_and_advance
from roseinfer.sampling import SamplingBatch, rows_without_a_distribution

INF, NAN = float("inf"), float("nan")


def advance(logits: torch.Tensor, lengths: torch.Tensor, active: torch.Tensor) -> list[list[int]]:
    """Return what was chosen, and the tokens to go on with."""
    chosen, tokens = torch.full((2, len(logits)), -7, device=logits.device)
    argmax_and_advance(logits, chosen, tokens, lengths, active)
    return [chosen.tolist(), tokens.tolist()]


def check(logits: torch.Tensor) -> list[int]:
    """Compared with what sampling does; returns what was chosen."""
    rows = len(logits)
    greedy = SamplingBatch.of([SamplingParams(temperature=0)] * rows, [0] * rows, logits.device)
    nowhere = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    want = greedy.sample_tokens(logits, nowhere)
    want = torch.where(rows_without_a_distribution(logits), -1, want)
    chosen, tokens = advance(logits, nowhere.clone(), nowhere)
    assert chosen == want.tolist()
    assert tokens == want.clamp(min=0).tolist()
    return chosen


@pytest.mark.sampled_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 97, 1023, 1024, 1025, 33000, 70001])
def test_every_width(device: str, width: int, dtype: torch.dtype) -> None:
    """One strip and several, of one tile and of several; in half precision there are ties."""
    torch.manual_seed(width)
    logits = torch.randn(3, width).to(dtype).to(device)
    logits[2] *= -1e-3
    check(logits)


@pytest.mark.parametrize("first", [0, 1, 1023, 1024, 2047, 4999])
def test_a_tie_goes_to_the_first(device: str, first: int) -> None:
    """Within a tile, over tiles and over strips."""
    logits = torch.zeros(2, 70000, device=device)
    for other in (first, first + 1, first + 1024, first + 3072, 69999):
        logits[:, other] = 3
    logits[1] -= 10
    assert check(logits) == [first, first]


def test_rows_without_a_distribution(device: str) -> None:
    logits = torch.zeros(8, 5000, device=device)
    logits[0, 4321] = NAN
    logits[1] = NAN
    logits[2] = -INF
    logits[3] = INF
    logits[4, [4000, 4100]] = INF
    logits[5] = -INF
    logits[5, 4999] = -3
    logits[6, :4999] = -INF
    logits[6, 4999] = INF
    logits[7, 0], logits[7, 1:] = NAN, INF
    assert check(logits) == [-1, -1, -1, -1, 4000, 4999, -1, -1]


def test_active_rows_grow_and_padding_stays(device: str) -> None:
    """The lengths are a column of a matrix, of which nothing else changes."""
    rows = torch.arange(12, device=device).view(4, 3)
    active = torch.tensor([[9, 1], [9, 0], [9, 1], [9, 0]], device=device)
    before = rows.clone()
    logits = torch.zeros(4, 10, device=device)
    logits[:, 6] = 1
    assert advance(logits, rows[:, 1], active[:, 1]) == [[6] * 4] * 2
    before[:, 1] += torch.tensor([1, 0, 1, 0], device=device)
    assert torch.equal(rows, before)


def test_rows_that_lie_apart(device: str) -> None:
    wide = torch.full((3, 200), NAN, device=device)
    wide[:, :120] = torch.randn(3, 120, device=device)
    check(wide[:, :120])
