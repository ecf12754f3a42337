"""Rotation in the kernel that stores tokens has the bits of the rotation kernel."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from roseinfer.kernels.triton import decode_attention
from roseinfer.kernels.triton.decode_attention import append_and_attend
from roseinfer.kernels.triton.rope import rotate
from roseinfer.layer_traits import LayerTraits, RotaryEmbedding


@pytest.mark.sampled_cases
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "turn"),
    [(4, 2, 16, 16), (3, 3, 64, 64), (8, 1, 20, 12), (7, 1, 128, 128)],
)
def test_bits_are_those_of_rotating_before(
    device: str, q_heads: int, kv_heads: int, dim: int, turn: int, splits: int
) -> None:
    torch.manual_seed(dim)
    lengths = torch.tensor([130, 0, 79], device=device)
    tables = (torch.randperm(30, device=device) + 1).view(3, 10)
    new = torch.randn(3, q_heads + 2 * kv_heads, dim, device=device).bfloat16()
    query, key, value = new.tensor_split([q_heads, q_heads + kv_heads], 1)
    angles = torch.rand(160, turn // 2, device=device).repeat(1, 2) * 6
    rotation = RotaryEmbedding(angles.cos().bfloat16(), angles.sin().bfloat16())
    keys, values = torch.randn(2, 31, kv_heads, 16, dim, device=device).bfloat16()
    same_keys, same_values = keys.clone(), values.clone()
    given = tables, lengths, LayerTraits(dim**-0.5)
    with mock.patch.object(decode_attention, "_num_splits", return_value=splits):
        got = append_and_attend(query, key, value, keys, values, *given, rotation)
        rotated, own_key = query.clone(), key.clone()
        rotate(rotated, own_key, lengths, rotation)
        want = append_and_attend(rotated, own_key, value, same_keys, same_values, *given)
    assert torch.equal(got, want)
    assert torch.equal(keys, same_keys)
    assert torch.equal(values, same_values)
    assert not torch.equal(own_key, key), "something was rotated"
