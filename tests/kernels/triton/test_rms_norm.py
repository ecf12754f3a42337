"""RMS norms on Triton kernels against the same in float64."""

from __future__ import annotations

import pytest
import torch

from roseinfer.kernels.triton.norm import (
    add_rms_norm,
    embed_rms_norm,
    rms_norm,
    rms_norm_then_add,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EPSILON = 1e-3
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
every_width = pytest.mark.parametrize("width", [1, 5, 64, 100])


def normed(stream: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    exact = stream.double()
    return exact * (exact.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain.double()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 4 * TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def drawn(width: int, parts: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return a stream of five rows, what is added to it in parts, and a gain."""
    torch.manual_seed(width)
    residual, gain = torch.randn(5, width, device=device), torch.randn(width, device=device)
    return residual.to(dtype), torch.randn(parts, 5, width, device=device), gain.to(dtype)


@pytest.mark.sampled_cases
@every_dtype
@every_width
@pytest.mark.parametrize("parts", [1, 3])
def test_the_stream_is_added_to_and_normed(
    device: str, width: int, dtype: torch.dtype, parts: int
) -> None:
    residual, added, gain = drawn(width, parts, device, dtype)
    want = residual.double() + 0.5 * added.double().sum(0)
    got = add_rms_norm(residual, added, gain, EPSILON, 0.5)
    assert_close(residual, want)
    assert_close(got, normed(residual, gain))
    assert torch.equal(rms_norm(residual, gain, EPSILON), got)


@every_dtype
@every_width
@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_added_is_normed_before(
    device: str, width: int, dtype: torch.dtype, parts: int
) -> None:
    residual, added, gain = drawn(width, parts, device, dtype)
    want = residual.double() + normed(added.double().sum(0), gain)
    rms_norm_then_add(residual, added, gain, EPSILON)
    assert_close(residual, want)


def test_rows_that_lie_apart(device: str) -> None:
    """What lies between the rows is neither read nor written."""
    for add in (add_rms_norm, rms_norm_then_add):
        residual, added, gain = drawn(6, 2, device, torch.float32)
        wide = torch.full((5, 20), float("nan"), device=device)
        apart = torch.full((2, 5, 9), float("nan"), device=device)
        wide[:, :6], apart[..., :6] = residual, added
        add(wide[:, :6], apart[..., :6], gain, EPSILON)
        add(residual, added, gain, EPSILON)
        assert torch.equal(wide[:, :6], residual)
        assert wide[:, 6:].isnan().all()


@every_dtype
@every_width
def test_tokens_become_a_stream(device: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    words, gain = torch.randn(11, width, device=device), torch.randn(width, device=device)
    words, gain = words.to(dtype), gain.to(dtype)
    tokens = torch.tensor([3, 10, 3, 0], device=device)
    residual, got = embed_rms_norm(tokens, words, gain, EPSILON, 3.0)
    assert_close(residual, 3.0 * words.double()[tokens])
    assert_close(got, normed(residual, gain))
