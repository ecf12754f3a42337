"""Shapes on a GPU: few are drawn, and every listed size occurs in one of them."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, KVCacheAdapter
from pytest_roseinfer.capabilities.attention import _QUERY_HEADS
from pytest_roseinfer.capabilities.cache_data import Bounds, choose_shapes, few_of
from pytest_roseinfer.capabilities.payload import LAYOUTS, VIEWS
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import cache_specs, histories
from tests.capabilities.caches.list_cache import ListCache

if TYPE_CHECKING:
    from pytest_roseinfer.histories.history import History

LISTED = KVCacheAdapter.head_counts, KVCacheAdapter.head_dims, KVCacheAdapter.block_sizes


def draw_specs(device: str, examples: int = 200) -> list[CacheSpec]:
    specs: list[CacheSpec] = []

    @seed(1)
    @hypothesis_settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate]
    )
    @given(cache_specs(device=device))
    def record(spec: CacheSpec) -> None:
        specs.append(spec)

    record()
    return specs


def compiled_shapes(specs: list[CacheSpec]) -> set[tuple[object, ...]]:
    """Return the values a kernel is compiled for, including the strides between layers."""
    return {astuple(spec)[1:6] for spec in specs}


def test_few_shapes_cover_all_sizes() -> None:
    specs = draw_specs("cuda")
    assert len(compiled_shapes(specs)) <= 20 < len(compiled_shapes(draw_specs("cpu"))) / 4
    assert {spec.num_heads for spec in specs} == {*KVCacheAdapter.head_counts}
    assert {spec.head_dim for spec in specs} == {*KVCacheAdapter.head_dims}
    assert {spec.block_size for spec in specs} == {*KVCacheAdapter.block_sizes}
    assert {spec.dtype for spec in specs} == {*KVCacheAdapter.dtypes}


def test_few_shapes_include_small_and_large_ones() -> None:
    """Small shapes do not fill a tile of a kernel, and large ones exceed it."""
    shapes = choose_shapes(*map(tuple, LISTED), ("float32",), Bounds(3200, 12800))
    sizes = sorted(heads * dim for (heads, dim, _), _ in shapes)
    assert sizes[0] == 1
    assert sizes[-1] > 2500
    assert all(heads * dim * block <= 12800 for (heads, dim, block), _ in shapes)


def test_each_shape_has_two_of_each_choice_and_all_are_covered() -> None:
    specs = draw_specs("cuda")
    attention_specs = [spec for spec in specs if spec.num_heads <= 6]
    for choices, shapes in (
        (LAYOUTS, specs),
        (VIEWS, attention_specs),
        (_QUERY_HEADS, attention_specs),
    ):
        choices_of_shapes = [few_of(choices, spec) for spec in shapes]
        assert {len(each) for each in choices_of_shapes} == {2}
        assert {choice for each in choices_of_shapes for choice in each} == {*choices}


def test_layouts_of_a_history_belong_to_its_shape() -> None:
    unexpected: set[str] = set()
    used: set[str] = set()

    @seed(1)
    @hypothesis_settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate])
    @given(histories(ListCache, device="cuda"))
    def record(history: History) -> None:
        layouts = {step.layout for step in history.operations if isinstance(step, Append)}
        used.update(layouts)
        unexpected.update(layouts - {*few_of(LAYOUTS, history.spec)})

    record()
    assert not unexpected
    assert len(used) > 2


def test_single_choice_is_kept() -> None:
    assert few_of(["plain"], CacheSpec()) == ["plain"]
