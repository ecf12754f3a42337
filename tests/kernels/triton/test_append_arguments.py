"""Arguments that the append kernels' wrappers refuse without writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import BadArgument
from tests.kernels.triton.append_calls import CACHE_SHAPE, KERNELS, Caches, index, new_tokens, run

if TYPE_CHECKING:
    from collections.abc import Callable

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def refused(
    device: str, kernel: str, words: str, change: Callable[[Caches], dict[str, Any]]
) -> None:
    caches = Caches.build(device, CACHE_SHAPE)
    before = caches.copy()
    given = change(caches)
    with pytest.raises(BadArgument, match=words):
        run(kernel, caches.pair, new_tokens(caches), **given)
    caches.assert_same(before)


CACHES: dict[str, tuple[Callable[[Caches], dict[str, Any]], str]] = {
    "three_dimensions": (
        lambda c: {"k_cache_layer": c.pair[0][0], "v_cache_layer": c.pair[1][0]},
        r"must be 4-dimensional and of one shape; they are \(3, 4, 5\)",
    ),
    "different_shapes": (
        lambda c: {"v_cache_layer": c.pair[1][:5]},
        r"of one shape; they are \(6, 3, 4, 5\) and \(5, 3, 4, 5\)",
    ),
    "different_dtypes": (
        lambda c: {"v_cache_layer": c.pair[1].half()},
        "must share dtype and device; they are torch.float32 .* torch.float16",
    ),
    "different_devices": (
        lambda c: {"v_cache_layer": elsewhere(c.pair[1])},
        "must share dtype and device",
    ),
}
INPUTS: dict[str, tuple[Callable[[Caches], dict[str, Any]], str]] = {
    "key_of_other_heads": (
        lambda c: {"key_new": c.flat.new_zeros(5, 4, 5)},
        r"key_new must be \[rows, 3, 5\], not \(5, 4, 5\)",
    ),
    "value_of_other_head_dim": (
        lambda c: {"value_new": c.flat.new_zeros(5, 3, 6)},
        r"value_new must be \[rows, 3, 5\], not \(5, 3, 6\)",
    ),
    "key_without_rows": (
        lambda c: {"key_new": c.flat.new_zeros(3, 5)},
        r"key_new must be \[rows, 3, 5\], not \(3, 5\)",
    ),
    "fewer_values_than_keys": (
        lambda c: {"value_new": c.flat.new_zeros(4, 3, 5)},
        "key_new has 5 rows and value_new 4",
    ),
    "key_elsewhere": (
        lambda c: {"key_new": elsewhere(c.flat.new_zeros(5, 3, 5))},
        "key_new is on .* and the cache on ",
    ),
    "value_elsewhere": (
        lambda c: {"value_new": elsewhere(c.flat.new_zeros(5, 3, 5))},
        "value_new is on .* and the cache on ",
    ),
}


@every_kernel
@pytest.mark.parametrize(("change", "words"), CACHES.values(), ids=CACHES)
def test_caches_that_do_not_fit(
    device: str, kernel: str, change: Callable[[Caches], dict[str, Any]], words: str
) -> None:
    refused(device, kernel, words, change)


@every_kernel
@pytest.mark.parametrize(("change", "words"), INPUTS.values(), ids=INPUTS)
def test_inputs_that_do_not_fit(
    device: str, kernel: str, change: Callable[[Caches], dict[str, Any]], words: str
) -> None:
    refused(device, kernel, words, change)


INDICES = [
    (kernel, name)
    for kernel, names in {
        "gather": ("batch_idx", "block_idx", "pos"),
        "identity_pos": ("block_idx", "pos"),
        "full_batch": ("block_idx",),
    }.items()
    for name in names
]
BOUNDS = {"batch_idx": 5, "block_idx": 6, "pos": 4}

every_index = pytest.mark.parametrize(("kernel", "name"), INDICES)


def good_index(kernel: str, name: str, device: str) -> torch.Tensor:
    slots = KERNELS[kernel]
    numbers = {"batch_idx": slots.rows, "block_idx": slots.blocks, "pos": slots.positions}
    return index(numbers[name], device)


@every_index
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool], ids=str)
def test_an_index_of_another_dtype(device: str, kernel: str, name: str, dtype: torch.dtype) -> None:
    bad = good_index(kernel, name, device).to(dtype)
    words = f"{name} must be int32 or int64, not {dtype}"
    refused(device, kernel, words, lambda _: {name: bad})


@every_index
def test_an_index_elsewhere(device: str, kernel: str, name: str) -> None:
    bad = elsewhere(good_index(kernel, name, device))
    refused(device, kernel, f"{name} is on .* and the cache on ", lambda _: {name: bad})


@every_index
@pytest.mark.parametrize("past", ["below", "above"])
@pytest.mark.parametrize("at", [0, 2, -1])
def test_an_index_out_of_range(device: str, kernel: str, name: str, past: str, at: int) -> None:
    """All rows are checked, whichever has the bad index."""
    bound = BOUNDS[name]
    bad = good_index(kernel, name, device)
    bad[at] = -1 if past == "below" else bound
    words = rf"{name} must lie in 0\.\.{bound - 1}; it spans "
    refused(device, kernel, words, lambda _: {name: bad})


@pytest.mark.parametrize(
    ("kernel", "name"), [case for case in INDICES if case != ("gather", "batch_idx")]
)
@pytest.mark.parametrize("form", ["short", "long", "table"])
def test_an_index_of_another_shape(device: str, kernel: str, name: str, form: str) -> None:
    good = good_index(kernel, name, device)
    bad = {"short": good[:-1], "long": good.repeat(2), "table": good[:, None]}[form]
    words = rf"{name} must have shape \({len(good)},\), not "
    refused(device, kernel, words, lambda _: {name: bad})


def test_a_table_of_rows(device: str) -> None:
    bad = good_index("gather", "batch_idx", device)[:, None]
    refused(device, "gather", "batch_idx must have shape", lambda _: {"batch_idx": bad})


@pytest.mark.parametrize("position", [-1, 4, 100])
def test_a_position_outside_the_block(device: str, position: int) -> None:
    words = rf"pos must lie in 0\.\.3, not {position}"
    refused(device, "full_batch", words, lambda _: {"pos": position})
