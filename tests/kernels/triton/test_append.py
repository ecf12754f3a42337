"""Direct calls of ``kv_append_triton`` and its two specialisations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.triton.append_calls import (
    CACHE_SHAPE,
    KERNELS,
    LAYOUTS,
    Caches,
    Pair,
    Shape,
    Slots,
    after_slow_append,
    assert_appends,
    index,
    new_tokens,
    off_by_one,
    run,
)
from tests.kv.twins import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@every_kernel
@every_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_of_any_strides(
    device: str,
    kernel: str,
    layout: Callable[[torch.Tensor, Shape], Pair],
    dtype: torch.dtype,
) -> None:
    caches = Caches.build(device, CACHE_SHAPE, layout, dtype)
    assert_appends(kernel, caches, new_tokens(caches))


@every_kernel
@every_layout
def test_inputs_of_any_strides(
    device: str, kernel: str, layout: Callable[[torch.Tensor, Shape], Pair]
) -> None:
    """The cache layouts, used for inputs; keys and values may differ in strides."""
    caches = Caches.build(device, CACHE_SHAPE)
    key, value = Caches.build(device, (1, 5, 3, 5), layout).pair
    assert_appends(kernel, caches, (key[0], value[0]))


@every_kernel
@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize("head_dim", [1, 3, 33, 80, 96])
def test_any_head_dim_and_number_of_heads(
    device: str, kernel: str, heads: int, head_dim: int
) -> None:
    caches = Caches.build(device, (6, heads, 4, head_dim))
    assert_appends(kernel, caches, new_tokens(caches))


@every_kernel
@pytest.mark.parametrize(("heads", "head_dim"), [(5, 1500), (7, 700), (2, 4097)])
def test_tokens_larger_than_one_tile(device: str, kernel: str, heads: int, head_dim: int) -> None:
    """Heads are split over programs, the last of which has fewer than the others."""
    caches = Caches.build(device, (6, heads, 4, head_dim), dtype=torch.float16)
    assert_appends(kernel, caches, new_tokens(caches))


@every_kernel
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_any_number_of_tokens(device: str, kernel: str, count: int) -> None:
    """Programs that handle several tokens must stop at the last one."""
    caches = Caches.build(device, (2 * count, 3, 4, 5))
    order = tuple(random.Random(count).sample(range(2 * count), count))
    slots = {
        "gather": Slots(order, order[::-1], tuple(row % 4 for row in range(count))),
        "identity_pos": Slots(tuple(range(count)), order, tuple(row % 4 for row in range(count))),
        "full_batch": Slots(tuple(range(count)), order, (3,) * count),
    }[kernel]
    inputs = new_tokens(caches, rows=2 * count if kernel == "gather" else count)
    given: dict[str, Any] = {"block_idx": index(slots.blocks, device)}
    given["pos"] = 3 if kernel == "full_batch" else index(slots.positions, device)
    if kernel == "gather":
        given["batch_idx"] = index(slots.rows, device)
    expected = after_slow_append(caches, inputs, slots)
    run(kernel, caches.pair, inputs, **given)
    caches.assert_same(expected)


@every_kernel
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_indices_of_either_width(device: str, kernel: str, index_dtype: torch.dtype) -> None:
    caches, slots = Caches.build(device, CACHE_SHAPE), KERNELS[kernel]
    given = {"block_idx": index(slots.blocks, device, index_dtype)}
    if kernel != "full_batch":
        given["pos"] = index(slots.positions, device, index_dtype)
    if kernel == "gather":
        given["batch_idx"] = index(slots.rows, device, index_dtype)
    assert_appends(kernel, caches, new_tokens(caches), **given)


@pytest.mark.parametrize("kernel", ["gather", "identity_pos"])
@pytest.mark.parametrize("narrow", ["block_idx", "pos"])
def test_indices_of_both_widths_in_one_call(device: str, kernel: str, narrow: str) -> None:
    caches, slots = Caches.build(device, CACHE_SHAPE), KERNELS[kernel]
    numbers = {"block_idx": slots.blocks, "pos": slots.positions}[narrow]
    given = {narrow: index(numbers, device, torch.int32)}
    assert_appends(kernel, caches, new_tokens(caches), **given)


@every_kernel
def test_indices_that_are_views(device: str, kernel: str) -> None:
    """A table column, and a slice that starts off a 16-byte boundary."""
    caches, slots = Caches.build(device, CACHE_SHAPE), KERNELS[kernel]
    table = torch.stack([index(slots.blocks, device), index(slots.blocks, device) * 0], dim=1)
    given = {"block_idx": table[:, 0]}
    if kernel != "full_batch":
        given["pos"] = index((0, *slots.positions), device)[1:]
    assert_appends(kernel, caches, new_tokens(caches), **given)


@every_kernel
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_another_dtype_is_cast_as_torch_casts(
    device: str, kernel: str, given: torch.dtype, stored: torch.dtype
) -> None:
    caches = Caches.build(device, CACHE_SHAPE, dtype=stored)
    numbers = torch.linspace(-70000, 70000, 5 * 3 * 5, dtype=torch.float64).view(5, 3, 5)
    key, value = numbers.to(given).to(device), (1 / (numbers + 3)).to(given).to(device)
    assert_appends(kernel, caches, (key, value))


def special_words(dtype: torch.dtype) -> torch.Tensor:
    """Return quiet and signalling NaNs with payloads, infinities, -0.0, the least denormal."""
    words: dict[torch.dtype, list[int]] = {
        torch.float32: [0x7FC00001, 0x7F800001, -0x400001, -0x7FFFFF, -(2**31), 1, 0x7F800000],
        torch.float16: [0x7E01, 0x7C01, -0x1FF, -0x3FF, -(2**15), 1, 0x7C00],
        torch.bfloat16: [0x7FC1, 0x7F81, -0x3F, -0x7F, -(2**15), 1, 0x7F80],
    }
    ints = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.tensor(words[dtype], dtype=ints).view(dtype)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_bit_patterns_arrive_as_they_are(
    device: str, kernel: str, dtype: torch.dtype
) -> None:
    special = special_words(dtype).to(device)
    caches = Caches.build(device, (6, 3, 4, len(special)), dtype=dtype)
    key = special.expand(5, 3, -1).contiguous()
    value = special.roll(1).expand(5, 3, -1).contiguous()
    assert_appends(kernel, caches, (key, value))


@every_kernel
def test_swapped_inputs_do_not_go_unnoticed(device: str, kernel: str) -> None:
    """The comparison above can tell keys from values."""
    caches = Caches.build(device, CACHE_SHAPE)
    key, value = new_tokens(caches)
    expected = after_slow_append(caches, (key, value), KERNELS[kernel])
    run(kernel, caches.pair, (value, key))
    with pytest.raises(AssertionError, match="elements differ"):
        caches.assert_same(expected)


@every_kernel
def test_swapped_caches_do_not_go_unnoticed(device: str, kernel: str) -> None:
    caches = Caches.build(device, CACHE_SHAPE)
    inputs = new_tokens(caches)
    expected = after_slow_append(caches, inputs, KERNELS[kernel])
    keys, values = caches.pair
    run(kernel, (values, keys), inputs)
    with pytest.raises(AssertionError, match="elements differ"):
        caches.assert_same(expected)


@every_kernel
def test_no_tokens(device: str, kernel: str) -> None:
    caches = Caches.build(device, CACHE_SHAPE)
    before = caches.copy()
    none = index((), device)
    given = {"block_idx": none}
    if kernel != "full_batch":
        given["pos"] = none
    if kernel == "gather":
        given["batch_idx"] = none
    run(kernel, caches.pair, new_tokens(caches, rows=0), **given)
    caches.assert_same(before)


def test_gather_may_use_a_row_twice_and_leave_rows_out(device: str) -> None:
    caches = Caches.build(device, CACHE_SHAPE)
    key, value = new_tokens(caches)
    expected = caches.copy()
    for cache, new in zip(expected.pair, (key, value), strict=True):
        cache[1, :, 0] = cache[4, :, 3] = new[2]
    given = {
        "batch_idx": index((2, 2), device),
        "block_idx": index((1, 4), device),
        "pos": index((0, 3), device),
    }
    run("gather", caches.pair, (key, value), **given)
    caches.assert_same(expected)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17])
def test_full_batch_at_any_position(device: str, position: int) -> None:
    """Positions that Triton specialises on: 1 and multiples of 16."""
    caches = Caches.build(device, (6, 3, 18, 5))
    inputs = new_tokens(caches)
    expected = caches.copy()
    for cache, new in zip(expected.pair, inputs, strict=True):
        cache[list(KERNELS["full_batch"].blocks), :, position] = new
    run("full_batch", caches.pair, inputs, pos=position)
    caches.assert_same(expected)


@every_kernel
@pytest.mark.parametrize("shifted", ["caches", "inputs", "index"])
def test_unaligned_tensors_after_aligned_ones_of_the_same_form(
    device: str, kernel: str, shifted: str
) -> None:
    """A kernel compiled for aligned addresses reads 16 bytes at once and must not be reused."""
    shape, slots = (6, 4, 4, 64), KERNELS[kernel]
    caches = Caches.build(device, shape, dtype=torch.float16)
    assert_appends(kernel, caches, new_tokens(caches))
    if shifted == "caches":
        caches = Caches.build(device, shape, off_by_one, torch.float16)
    key, value = new_tokens(caches)
    if shifted == "inputs":
        key, value = off_by_one(torch.cat([key.flatten()] * 3), key.shape)
    given = {"block_idx": index((0, *slots.blocks), device)[1:]} if shifted == "index" else {}
    assert_appends(kernel, caches, (key, value), **given)


@every_kernel
def test_calls_of_different_kinds_one_after_the_other(device: str, kernel: str) -> None:
    """A kernel cached by one launch must not be reused for another kind of argument."""
    slots = KERNELS[kernel]
    for dtype in (*DTYPES, *DTYPES):
        for layout in LAYOUTS.values():
            caches = Caches.build(device, CACHE_SHAPE, layout, dtype)
            assert_appends(kernel, caches, new_tokens(caches))
            narrow = index(slots.blocks, device, torch.int32)
            assert_appends(kernel, caches, new_tokens(caches), block_idx=narrow)
