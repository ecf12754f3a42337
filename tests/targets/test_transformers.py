"""The caches of transformers: they conform, and planted bugs fail."""

from __future__ import annotations

import contextlib
import io
import re
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from transformers import DynamicCache

from pytest_roseinfer import Divergence, conformance, settings
from pytest_roseinfer.run import coverage
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.paged_attention_cache import (
    ForkedPagedAttentionCacheAdapter,
    PagedAttentionCacheAdapter,
    SlidingPagedAttentionCacheAdapter,
    UnsharedPagedAttentionCacheAdapter,
)
from tests.others.found_scripts import scripts_about
from tests.others.pictures import WindowOfOne

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from tests.project import Project

WRITES = {"append_many", "prefill", "free", "gather"}
PAGED = WRITES | {"append_padded", "reserve", "fill"}
OFFERED = {
    DynamicCacheAdapter: WRITES | {"fork", "truncate", "reorder"},
    PagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena"},
    UnsharedPagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena"},
    ForkedPagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena", "fork"},
    SlidingPagedAttentionCacheAdapter: PAGED | {"fork"},
}
VERSION = "5.23.0"
"""The version that docs/findings describes."""
SCRIPTS = scripts_about(f"transformers {VERSION}: caches")


@pytest.fixture(autouse=True)
def short_run() -> Iterator[None]:
    """Run few histories, whatever the enclosing run's settings are."""
    previous_settings, previous_coverage = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=30, steps=10, seed=1))
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(previous_settings)
    coverage.set_current(previous_coverage)


def skip_if_too_old(adapter: type[Any]) -> None:
    """Skip a test of an adapter whose cache the installed transformers cannot build."""
    parameters = signature(transformers.ContinuousBatchingConfig).parameters
    if issubclass(adapter, PagedAttentionCacheAdapter) and "page_size" not in parameters:
        pytest.skip(f"transformers {transformers.__version__} has no page_size, as {VERSION} has")


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", OFFERED)
def test_transformers_cache_conforms(adapter: type[KVCacheAdapter]) -> None:
    skip_if_too_old(adapter)
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    if "fork" in OFFERED[adapter]:
        tests.test_fork_then_append_equals_copy_then_append()
    if adapter.option_choices:
        tests.test_every_option_ends_in_the_same_bits()
    assert coverage.current().of(adapter).histories >= 30


@pytest.mark.parametrize("adapter", OFFERED)
def test_transformers_adapter_offers_its_methods(adapter: type[KVCacheAdapter]) -> None:
    assert adapter.abilities == OFFERED[adapter]


@pytest.mark.slow
def test_suite_runs_a_transformers_adapter_by_name(project: Project) -> None:
    name = "pytest_roseinfer.targets.dynamic_cache:DynamicCacheAdapter"
    result = project.pytest(
        "-v",
        "--pyargs",
        "pytest_roseinfer.suite",
        f"--roseinfer-target={name}",
        "--roseinfer-examples=5",
    )
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["tested: make *, append *, peek *, *fork *, *append_many *"])


# ----------------------------------------------------------------------------- planted bugs


class LosesTokens(DynamicCacheAdapter):
    """Loses the last token whenever a sequence reaches the end of a block."""

    def new_cache(self) -> Any:
        size = self.spec.block_size

        def update(cache: Any, key: Any, value: Any, layer: int) -> Any:
            DynamicCache.update(cache, key, value, layer)
            cache_layer = cache.layers[layer]
            if cache_layer.keys.shape[-2] % size == 0:
                cache_layer.keys = cache_layer.keys[..., :-1, :]
            return cache_layer.keys, cache_layer.values

        cache = super().new_cache()
        cache.__class__ = type("LosingCache", (DynamicCache,), {"update": update})
        return cache


class SelectsOthers(DynamicCacheAdapter):
    """Returns rows in their old order, whichever was requested."""

    def new_cache(self) -> Any:
        def select(cache: Any, indices: torch.Tensor) -> None:
            DynamicCache.batch_select_indices(cache, indices.sort().values)

        cache = super().new_cache()
        methods = {"batch_select_indices": select, "reorder_cache": select}
        cache.__class__ = type("SortingCache", (DynamicCache,), methods)
        return cache


def planted(base: type[PagedAttentionCacheAdapter], plant: Callable[[Any], None]) -> Any:
    """Return an adapter that plants a bug in each cache it builds."""

    def make(adapter: PagedAttentionCacheAdapter, spec: CacheSpec) -> None:
        base.make(adapter, spec)
        plant(adapter.cache)

    return type(f"{base.__name__}_{plant.__name__}", (base,), {"make": make})


def lose_the_end_of_a_block(cache: Any) -> None:
    for allocator in cache.cache_allocators.values():
        original = allocator.get_write_indices

        def broken(
            name: str, past: int, count: int, original: Any = original, allocator: Any = allocator
        ) -> list[int]:
            indices: list[int] = original(name, past, count)
            if (past + count) % allocator.tokens_per_page == 0:
                indices[-1] = allocator.write_trash_index
            return indices

        allocator.get_write_indices = broken


def leak_a_block(cache: Any) -> None:
    """Keep the last block of an ended request that had several."""
    (allocator,) = cache.cache_allocators.values()
    original = allocator.free_blocks

    def broken(name: str, no_cache: bool = False) -> None:
        allocator.block_table[name][1:] = allocator.block_table[name][1:-1]
        original(name, no_cache)

    allocator.free_blocks = broken


def forget_to_return_evicted_blocks(cache: Any) -> None:
    (allocator,) = cache.cache_allocators.values()
    original = allocator.ledger.evict_cached_blocks

    def broken() -> list[int]:
        return list(original()[1:])

    allocator.ledger.evict_cached_blocks = broken


def share_a_partial_block(cache: Any) -> None:
    for allocator in cache.cache_allocators.values():
        allocator.count_shareable_blocks = lambda name, _, allocator=allocator: len(
            allocator.block_table[name]
        )


def free_a_shared_block(cache: Any) -> None:
    (allocator,) = cache.cache_allocators.values()
    original = allocator.ledger.release

    def broken(block: int, no_cache: bool = False) -> bool:
        original(block, no_cache)
        return True

    allocator.ledger.release = broken


def read_a_window_too_far_back(cache: Any) -> None:
    allocator = cache.cache_allocators["sliding_attention"]

    def broken(name: str, past: int, count: int) -> list[int]:
        window = allocator.sliding_window
        length = min(past, window - 1)
        start = past % window if past >= window else 0
        slots = allocator._token_indices_to_physical_indices(name, start, length)
        return [*slots, *[allocator.sentinel_index] * count]

    allocator.get_read_indices = broken


BROKEN: list[tuple[type[KVCacheAdapter], str]] = [
    (LosesTokens, "expected sequence|expected shape"),
    (SelectsOthers, "expected sequence"),
    (planted(PagedAttentionCacheAdapter, lose_the_end_of_a_block), "found poison"),
    (planted(PagedAttentionCacheAdapter, leak_a_block), "refcount"),
    (planted(PagedAttentionCacheAdapter, forget_to_return_evicted_blocks), "refcount|refused"),
    (
        planted(ForkedPagedAttentionCacheAdapter, share_a_partial_block),
        "expected sequence|refcount|shared",
    ),
    (planted(ForkedPagedAttentionCacheAdapter, free_a_shared_block), "expected sequence|free list"),
    (planted(SlidingPagedAttentionCacheAdapter, lose_the_end_of_a_block), "expected sequence"),
    (planted(SlidingPagedAttentionCacheAdapter, read_a_window_too_far_back), "expected sequence"),
]


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("adapter", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_bug_of_transformers_is_found(adapter: type[KVCacheAdapter], what: str) -> None:
    skip_if_too_old(adapter)
    settings.set_current(settings.Settings(examples=200, steps=10, seed=1))
    with pytest.raises(Divergence) as failure:
        conformance(adapter)().test_histories()
    assert re.search(what, failure.value.summary)


# ------------------------------------------------------------------------ bugs of docs/findings

only_that_version = pytest.mark.skipif(
    transformers.__version__ != VERSION,
    reason=f"docs/findings is about transformers {VERSION}",
)


@only_that_version
def test_window_of_one_that_keeps_all_tokens_is_found() -> None:
    with pytest.raises(Divergence, match=r"gather: .* expected shape \[\d+, .* found \["):
        conformance(WindowOfOne)().test_histories()


@only_that_version
@pytest.mark.parametrize(("script", "expected_output"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_documented_script_prints_its_output(script: str, expected_output: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(script, "docs/findings", "exec"), {})
    assert output.getvalue() == expected_output
