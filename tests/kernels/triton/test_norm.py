"""The residual stream on Triton kernels against torch's own normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer.kernels.triton.norm import add_norm, embed_norm

if TYPE_CHECKING:
    from torch import nn

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_width = pytest.mark.parametrize("width", [1, 5, 64, 100])


def norm_of(width: int, device: str, dtype: torch.dtype) -> nn.LayerNorm:
    norm = torch.nn.LayerNorm(width, eps=1e-3, device=device)
    with torch.no_grad():
        norm.weight.normal_(1)
        norm.bias.normal_()
    return norm.to(dtype).requires_grad_(False)


def check(got: torch.Tensor, stream: torch.Tensor, norm: nn.LayerNorm) -> None:
    """``got`` is ``stream`` normed, by arithmetic in float64."""
    exact = torch.nn.functional.layer_norm(
        stream.double(), norm.normalized_shape, norm.weight.double(), norm.bias.double(), norm.eps
    )
    tolerance = 4 * TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.sampled_cases
@every_dtype
@every_width
@pytest.mark.parametrize("parts", [1, 3])
def test_the_stream_is_added_to_and_normed(
    device: str, width: int, dtype: torch.dtype, parts: int
) -> None:
    torch.manual_seed(width)
    norm, (bias, *stream) = norm_of(width, device, dtype), torch.randn(6, width, device=device)
    residual, bias = torch.stack(stream).to(dtype), bias.to(dtype)
    added = torch.randn(parts, 5, width, device=device)
    want = (residual.double() + added.double().sum(0) + bias.double()).to(dtype)
    got = add_norm(residual, added, bias, norm)
    torch.testing.assert_close(residual, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    check(got, residual, norm)


def test_without_a_bias_and_with_rows_that_lie_apart(device: str) -> None:
    torch.manual_seed(0)
    norm = norm_of(6, device, torch.float32)
    wide = torch.full((4, 20), float("nan"), device=device)
    wide[:, :6] = torch.randn(4, 6, device=device)
    added = torch.full((2, 4, 9), float("nan"), device=device)
    added[..., :6] = torch.randn(2, 4, 6, device=device)
    want = wide[:, :6] + added[..., :6].sum(0)
    got = add_norm(wide[:, :6], added[..., :6], None, norm)
    torch.testing.assert_close(wide[:, :6], want)
    assert wide[:, 6:].isnan().all(), "what lies between the rows must stay as it is"
    check(got, wide[:, :6], norm)


@every_dtype
@every_width
def test_tokens_and_positions_become_a_stream(device: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    norm = norm_of(width, device, dtype)
    words, places = torch.randn(2, 11, width, device=device).to(dtype)
    tokens = torch.tensor([3, 10, 3, 0], device=device)
    rows = torch.tensor([[0, 99], [7, 99], [10, 99], [2, 99]], device=device)
    residual, normed = embed_norm(tokens, rows[:, 0], words, places, norm)
    want = words[tokens] + places[rows[:, 0]]
    torch.testing.assert_close(residual, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    check(normed, residual, norm)
