"""Shapes of drawn caches: every listed one is drawn, and no other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, KVCacheAdapter, conformance, settings
from pytest_roseinfer.histories.strategies import boundary_lengths, cache_specs, histories
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.shaped_caches import CutsHeadsAt128, FewShapes, MasksPositions

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SHAPE = ("head_counts", "head_dims", "block_sizes")


def draw_specs(strategy: SearchStrategy[CacheSpec], examples: int) -> list[CacheSpec]:
    specs: list[CacheSpec] = []

    @seed(1)
    @hypothesis_settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate]
    )
    @given(strategy)
    def record(spec: CacheSpec) -> None:
        specs.append(spec)

    record()
    return specs


def sizes_of(specs: list[CacheSpec]) -> dict[str, set[Any]]:
    return {
        "head_counts": {spec.num_heads for spec in specs},
        "head_dims": {spec.head_dim for spec in specs},
        "block_sizes": {spec.block_size for spec in specs},
    }


def test_every_default_size_is_drawn_and_caches_stay_small() -> None:
    specs = draw_specs(cache_specs(), 500)
    assert sizes_of(specs) == {name: set(getattr(KVCacheAdapter, name)) for name in SHAPE}
    assert {64, 80, 96, 128, 256} <= set(KVCacheAdapter.head_dims)
    assert 1 in KVCacheAdapter.block_sizes
    assert max(spec.num_heads * spec.head_dim * spec.block_size for spec in specs) <= 12800
    assert sum(spec.head_dim > 16 for spec in specs) < len(specs) / 2


@pytest.mark.slow
def test_only_listed_shapes_are_drawn() -> None:
    specs = draw_specs(histories(FewShapes, max_steps=2).map(lambda history: history.spec), 150)
    assert sizes_of(specs) == {name: set(getattr(FewShapes, name)) for name in SHAPE}
    assert {spec.dtype for spec in specs} == {"bfloat16"}


def test_lengths_around_the_end_of_a_long_block_are_drawn() -> None:
    lengths: set[int] = set()

    @seed(1)
    @hypothesis_settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate])
    @given(boundary_lengths(1024))
    def record(length: int) -> None:
        lengths.add(length)

    record()
    assert {1023, 1024, 1025} <= lengths


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_cache_with_few_shapes_passes() -> None:
    settings.set_current(settings.Settings(examples=15, steps=8, seed=1))
    conformance(FewShapes)().test_histories()


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("adapter", [CutsHeadsAt128, MasksPositions])
def test_bug_in_one_shape_is_found(adapter: type[KVCacheAdapter], seed_number: int) -> None:
    settings.set_current(settings.Settings(examples=100, steps=4, seed=seed_number))
    with pytest.raises(Divergence) as failure:
        conformance(adapter)().test_histories()
    spec = failure.value.history.spec
    assert spec.head_dim == 256 if adapter is CutsHeadsAt128 else spec.block_size == 1


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("head_dims", (), "numbers of 1 or more, as in (64, 128)"),
        ("head_dims", 64, "numbers of 1 or more, as in (64, 128)"),
        ("head_counts", (0, 1), "numbers of 1 or more, as in (1, 8)"),
        ("block_sizes", ("16",), "numbers of 1 or more, as in (16, 32)"),
        ("block_sizes", {16}, "numbers of 1 or more, as in (16, 32)"),
        ("block_sizes", (True,), "numbers of 1 or more, as in (16, 32)"),
        ("dtypes", "float32", 'names of torch dtypes, as in ("float32", "bfloat16")'),
        ("dtypes", ("float33",), 'names of torch dtypes, as in ("float32", "bfloat16")'),
        (
            "dtypes",
            ("float32", "int8"),
            'names of torch dtypes, as in ("float32", "bfloat16"); '
            "int8 needs tolerance['int8'] as well",
        ),
    ],
)
def test_invalid_list_of_sizes_is_refused(name: str, value: Any, rule: str) -> None:
    wrong = type("Wrong", (ListCache,), {name: value})
    message = f"Wrong.{name} is {value!r}: list what the cache can be built with, the usual first: "
    with pytest.raises(TypeError, match=re.escape(message + rule)):
        conformance(wrong)
