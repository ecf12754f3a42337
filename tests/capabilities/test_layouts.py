"""Tensors with other memory layouts hold the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pytest_roseinfer import Divergence, History, conformance, run_history, settings
from pytest_roseinfer.capabilities.payload import VIEWS, lay_out
from pytest_roseinfer.histories.strategies import histories, strided_views
from tests.capabilities.caches import broken_packed_caches, interleaved_caches, packed_cache
from tests.capabilities.caches.interleaved_caches import Interleaved

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

TENSOR = torch.arange(2 * 3 * 2 * 4, dtype=torch.float32).view(2, 3, 2, 4)


@given(st.data())
def test_strided_view_has_the_same_values(data: st.DataObject) -> None:
    assert torch.equal(data.draw(strided_views(TENSOR)), TENSOR)


def test_layouts_have_distinct_strides_and_all_are_drawn() -> None:
    strides = {lay_out(TENSOR, layout).stride() for layout in VIEWS}
    assert len(strides) == len(VIEWS)
    drawn: set[tuple[int, ...]] = set()

    @given(strided_views(TENSOR))
    def draw(view: torch.Tensor) -> None:
        drawn.add(view.stride())

    draw()
    assert drawn == strides


def search(cache: type[KVCacheAdapter], examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(1)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", packed_cache.RIGHT, ids=lambda cache: cache.__name__)
def test_cache_with_packed_elements_passes(cache: type[KVCacheAdapter]) -> None:
    search(cache, examples=6)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", broken_packed_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_cache_whose_writers_and_readers_differ_fails(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence, match=r"(peek|gather): sequence"):
        search(broken, examples=300)


@pytest.mark.usefixtures("short_run")
def test_cache_with_interleaved_keys_and_values_passes() -> None:
    settings.set_current(settings.Settings(examples=10, steps=8, seed=1))
    conformance(Interleaved)().test_histories()


@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("broken", interleaved_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_cache_that_reads_another_layout_fails(
    broken: type[KVCacheAdapter], seed_number: int
) -> None:
    @hypothesis_settings(max_examples=200, database=None, phases=[Phase.generate], deadline=None)
    @seed(seed_number)
    @given(histories(broken))
    def check(history: History) -> None:
        run_history(broken, history)

    with pytest.raises(Divergence, match="gather: sequence"):
        check()
