"""On a GPU few shapes are drawn, and all that an adapter lists occurs in one of them."""

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


def drawn_on(device: str, times: int = 200) -> list[CacheSpec]:
    found: list[CacheSpec] = []

    @seed(1)
    @hypothesis_settings(max_examples=times, deadline=None, database=None, phases=[Phase.generate])
    @given(cache_specs(device=device))
    def note(spec: CacheSpec) -> None:
        found.append(spec)

    note()
    return found


def compiled_for(specs: list[CacheSpec]) -> set[tuple[object, ...]]:
    """Return what a kernel is compiled for, the strides between layers included."""
    return {astuple(spec)[1:6] for spec in specs}


def test_a_kernel_is_compiled_for_few_shapes_and_for_all_sizes() -> None:
    found = drawn_on("cuda")
    assert len(compiled_for(found)) <= 20 < len(compiled_for(drawn_on("cpu"))) / 4
    assert {spec.num_heads for spec in found} == {*KVCacheAdapter.head_counts}
    assert {spec.head_dim for spec in found} == {*KVCacheAdapter.head_dims}
    assert {spec.block_size for spec in found} == {*KVCacheAdapter.block_sizes}
    assert {spec.dtype for spec in found} == {*KVCacheAdapter.dtypes}


def test_small_shapes_and_large_ones_are_among_the_few() -> None:
    """A tile of a kernel is too small for some, and others are cut off at its end."""
    shapes = choose_shapes(*map(tuple, LISTED), ("float32",), Bounds(3200, 12800))
    sizes = sorted(heads * dim for (heads, dim, _), _ in shapes)
    assert sizes[0] == 1
    assert sizes[-1] > 2500
    assert all(heads * dim * block <= 12800 for (heads, dim, block), _ in shapes)


def test_each_shape_has_two_of_what_goes_with_it_and_none_is_left_out() -> None:
    specs = drawn_on("cuda")
    asked_for_attention = [spec for spec in specs if spec.num_heads <= 6]
    for choices, shapes in (
        (LAYOUTS, specs),
        (VIEWS, asked_for_attention),
        (_QUERY_HEADS, asked_for_attention),
    ):
        kept = [few_of(choices, spec) for spec in shapes]
        assert {len(each) for each in kept} == {2}
        assert {choice for each in kept for choice in each} == {*choices}


def test_the_layouts_of_a_history_are_those_of_its_shape() -> None:
    wrong: set[str] = set()
    used: set[str] = set()

    @seed(1)
    @hypothesis_settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate])
    @given(histories(ListCache, device="cuda"))
    def note(history: History) -> None:
        found = {step.layout for step in history.operations if isinstance(step, Append)}
        used.update(found)
        wrong.update(found - {*few_of(LAYOUTS, history.spec)})

    note()
    assert not wrong
    assert len(used) > 2


def test_one_choice_stays_the_only_one() -> None:
    assert few_of(["plain"], CacheSpec()) == ["plain"]
