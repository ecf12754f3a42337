"""Direct calls of ``kv_clone_triton``: whole blocks, every layer, all copies at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import BadArgument
from roseinfer.kernels.triton.clone import kv_clone_triton
from tests.kernels.triton.append_calls import LAYOUTS, Caches, Pair, Shape, apart, index, off_by_one
from tests.kv.twins import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (2, 6, 3, 4, 5)
COPIES = {
    "one": ((1,), (4,)),
    "several": ((1, 2), (4, 0)),
    "one_source_twice": ((1, 1), (4, 5)),
    "chain": ((1, 2, 3), (2, 3, 4)),
    "chain_backwards": ((3, 2, 1), (4, 3, 2)),
    "swap": ((1, 2), (2, 1)),
    "cycle": ((1, 2, 3), (2, 3, 1)),
    "onto_itself": ((1, 2), (1, 5)),
}

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_copy = pytest.mark.parametrize(("source", "target"), COPIES.values(), ids=COPIES)


def after_copies(caches: Caches, source: tuple[int, ...], target: tuple[int, ...]) -> Caches:
    """Copy the blocks in torch, reading every block before any is written."""
    expected = caches.copy()
    old = caches.copy().pair
    for new_cache, old_cache in zip(expected.pair, old, strict=True):
        for here, there in zip(source, target, strict=True):
            new_cache.select(-4, there).copy_(old_cache.select(-4, here))
    return expected


def assert_clones(caches: Caches, source: tuple[int, ...], target: tuple[int, ...]) -> None:
    expected = after_copies(caches, source, target)
    keys, values = caches.pair
    kv_clone_triton(
        k_cache=keys,
        v_cache=values,
        source=index(source, keys.device),
        target=index(target, keys.device),
    )
    caches.assert_same(expected)


@every_layout
@every_copy
def test_copies_are_simultaneous_in_any_layout(
    device: str,
    layout: Callable[[torch.Tensor, Shape], Pair],
    source: tuple[int, ...],
    target: tuple[int, ...],
) -> None:
    assert_clones(Caches.build(device, SHAPE, layout), source, target)


@every_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(
    device: str, layout: Callable[[torch.Tensor, Shape], Pair], dtype: torch.dtype
) -> None:
    assert_clones(Caches.build(device, SHAPE, layout, dtype), (1, 3), (2, 5))


@pytest.mark.parametrize("heads", [1, 12])
@pytest.mark.parametrize("head_dim", [1, 3, 33, 80, 96])
def test_any_head_dim_and_number_of_heads(device: str, heads: int, head_dim: int) -> None:
    assert_clones(Caches.build(device, (2, 4, heads, 4, head_dim)), (1, 2), (3, 0))


@pytest.mark.parametrize("shape", [(1, 3, 5, 7, 200), (2, 3, 16, 16, 16), (1, 3, 1, 1, 4097)])
def test_blocks_larger_than_one_program_copies(device: str, shape: Shape) -> None:
    """The last program's share is partial, or exactly full."""
    assert_clones(Caches.build(device, shape, dtype=torch.float16), (1,), (2,))


def test_unaligned_caches_after_aligned_ones_of_the_same_form(device: str) -> None:
    """A kernel compiled for aligned addresses reads 16 bytes at once and must not be reused."""
    for layout in (apart, off_by_one):
        assert_clones(Caches.build(device, (2, 4, 2, 4, 64), layout, torch.float16), (1,), (3,))


@every_layout
def test_a_single_layer_without_its_dimension(
    device: str, layout: Callable[[torch.Tensor, Shape], Pair]
) -> None:
    assert_clones(Caches.build(device, SHAPE[1:], layout), (1, 2), (2, 4))


@pytest.mark.parametrize(
    "dtypes",
    [(torch.int32, torch.int32), (torch.int32, torch.int64), (torch.int64, torch.int32)],
    ids=str,
)
def test_indices_of_either_width(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    caches = Caches.build(device, SHAPE)
    expected = after_copies(caches, (1, 2), (4, 0))
    keys, values = caches.pair
    source, target = index((1, 2), device, dtypes[0]), index((4, 0), device, dtypes[1])
    kv_clone_triton(k_cache=keys, v_cache=values, source=source, target=target)
    caches.assert_same(expected)


def test_swapped_caches_do_not_go_unnoticed(device: str) -> None:
    """Copying keys to values would be detected: their bits differ."""
    caches = Caches.build(device, SHAPE)
    expected = after_copies(caches, (1,), (4,))
    keys, values = caches.pair
    keys[:, 4], values[:, 4] = values[:, 1].clone(), keys[:, 1].clone()
    with pytest.raises(AssertionError, match="elements differ"):
        caches.assert_same(expected)


def test_no_copies(device: str) -> None:
    assert_clones(Caches.build(device, SHAPE), (), ())


def good(caches: Caches) -> dict[str, Any]:
    keys, values = caches.pair
    where = keys.device
    source, target = index((1, 2), where), index((4, 5), where)
    return {"k_cache": keys, "v_cache": values, "source": source, "target": target}


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "target_twice": (
        lambda g: {"target": g["target"] * 0},
        "target has a block twice",
    ),
    "target_twice_among_others": (
        lambda g: {"source": g["source"].repeat(2), "target": g["target"].repeat(2)},
        "target has a block twice",
    ),
    "source_above": (lambda g: {"source": g["source"] + 4}, r"source must lie in 0\.\.5"),
    "source_below": (lambda g: {"source": g["source"] - 2}, r"source must lie in 0\.\.5"),
    "target_above": (lambda g: {"target": g["target"] + 1}, r"target must lie in 0\.\.5"),
    "target_below": (lambda g: {"target": g["target"] - 5}, r"target must lie in 0\.\.5"),
    "fewer_targets": (lambda g: {"target": g["target"][:1]}, r"target must have shape \(2,\)"),
    "more_targets": (lambda g: {"source": g["source"][:1]}, r"target must have shape \(1,\)"),
    "table": (lambda g: {"source": g["source"][:, None]}, r"source must have shape \(2,\)"),
    "float_source": (lambda g: {"source": g["source"].float()}, "source must be int32 or int64"),
    "short_target": (lambda g: {"target": g["target"].short()}, "target must be int32 or int64"),
    "source_elsewhere": (
        lambda g: {"source": g["source"].to(elsewhere(g))},
        "source is on .* and the cache on ",
    ),
    "caches_of_two_shapes": (
        lambda g: {"v_cache": g["v_cache"][:, :5]},
        "must be 5-dimensional and of one shape",
    ),
    "one_cache_without_layers": (
        lambda g: {"v_cache": g["v_cache"][0]},
        "must be 5-dimensional and of one shape",
    ),
    "three_dimensions": (
        lambda g: {"k_cache": g["k_cache"][0, 0], "v_cache": g["v_cache"][0, 0]},
        "must be 5-dimensional and of one shape",
    ),
    "caches_of_two_dtypes": (
        lambda g: {"v_cache": g["v_cache"].half()},
        "must share dtype and device",
    ),
}


def elsewhere(given: dict[str, Any]) -> str:
    return "cpu" if given["k_cache"].device.type == "cuda" else "meta"


@pytest.mark.parametrize(("change", "words"), BAD.values(), ids=BAD)
def test_bad_arguments_change_nothing(
    device: str, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    caches = Caches.build(device, SHAPE)
    before = caches.copy()
    usual = good(caches)
    with pytest.raises(BadArgument, match=words):
        kv_clone_triton(**(usual | change(usual)))
    caches.assert_same(before)
