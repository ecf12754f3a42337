"""Inputs of another dtype, layout or autograd state: the same cache on every path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.kv.test_write_paths import WRITES
from tests.kv.twins import Twins, assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer import Path

all_writes = pytest.mark.parametrize("path", WRITES)
CASTS = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float32),
]


def twins_for(device: str, path: Path, dtype: torch.dtype = torch.float32) -> Twins:
    return Twins(device, WRITES[path].policy, dtype=dtype, lengths=WRITES[path].lengths)


def special_numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return halfway cases of rounding, overflows and underflows of float16, both zeros."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    flat = numbers.view(-1)
    special = torch.tensor([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-9, 70000.0, 1e-8, -1e-30, 65519.0])
    flat[: len(special)] = special
    return numbers.to(dtype).to(device)


@all_writes
@pytest.mark.parametrize(("input_dtype", "cache_dtype"), CASTS, ids=str)
def test_input_is_cast_as_torch_casts(
    device: str, path: Path, input_dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    twins = twins_for(device, path, cache_dtype)
    key = special_numbers((3, 3, 5), input_dtype, device)
    value = special_numbers((3, 3, 5), input_dtype, device).flip(0)
    assert twins.append(None, key, value)[path] == WRITES[path].times
    twins.check()
    for row, ids in enumerate(twins.fast_lists):
        last_key, last_value = (
            cache[:, -1] for cache in twins.fast.gather_sequence(twins.layer, ids)
        )
        assert_same_bits(last_key, key[row].to(cache_dtype), "key")
        assert_same_bits(last_value, value[row].to(cache_dtype), "value")


@all_writes
def test_keys_and_values_may_have_different_dtypes(device: str, path: Path) -> None:
    twins = twins_for(device, path, torch.float16)
    key = special_numbers((3, 3, 5), torch.float32, device)
    value = special_numbers((3, 3, 5), torch.bfloat16, device)
    assert twins.append(None, key, value)[path] == WRITES[path].times
    twins.check()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def batch_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def from_a_wider_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a slice of a fused projection: unaligned start, gaps between rows."""
    wide = tensor.new_zeros(tensor.shape[0], tensor.shape[1], 2 * tensor.shape[2] + 1)
    wide[:, :, 1 : 1 + tensor.shape[2]] = tensor
    return wide[:, :, 1 : 1 + tensor.shape[2]]


def every_other_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=0)[::2]


def one_head_for_all(tensor: torch.Tensor) -> torch.Tensor:
    """Expand one head to all without a copy, by stride 0."""
    return tensor[:, :1].expand_as(tensor)


LAYOUTS = (transposed, batch_last, from_a_wider_tensor, every_other_row, one_head_for_all)


@all_writes
@pytest.mark.parametrize("key_layout", LAYOUTS)
def test_strided_inputs_are_written(
    device: str, path: Path, key_layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Key and value have different strides, so that swapping them is detected."""
    twins = twins_for(device, path)
    key, value = key_layout(twins.token(3)), twins.token(3)
    assert key.stride() != value.stride()
    assert twins.append(None, key, value)[path] == WRITES[path].times
    assert twins.append(None, value, key)[path] == WRITES[path].times
    twins.check()


@all_writes
def test_inputs_that_require_grad_are_written(device: str, path: Path) -> None:
    """The cache copies the numbers and does not become part of the autograd graph."""
    twins = twins_for(device, path)
    key, value = twins.token(3).requires_grad_(), twins.token(3).requires_grad_()
    assert twins.append(None, key, value)[path] == WRITES[path].times
    twins.check()
    assert not twins.fast.keys.requires_grad
    assert not twins.fast.values.requires_grad


@all_writes
def test_inputs_are_not_modified(device: str, path: Path) -> None:
    twins = twins_for(device, path)
    key, value = twins.token(3), twins.token(3)
    copies = key.clone(), value.clone()
    twins.append(None, key, value)
    assert_same_bits(key, copies[0], "key")
    assert_same_bits(value, copies[1], "value")
