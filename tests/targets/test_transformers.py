"""transformers' own caches fit the harness, and one that was broken does not pass."""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import transformers
from transformers import DynamicCache

from pytest_roseinfer import Divergence, conformance, settings
from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import run_history
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.paged_attention_cache import (
    ForkedPagedAttentionCacheAdapter,
    PagedAttentionCacheAdapter,
    SlidingPagedAttentionCacheAdapter,
    UnsharedPagedAttentionCacheAdapter,
)
from tests.others.found_scripts import PAGE, scripts_about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer import KVCacheAdapter
    from tests.project import Project

WRITES = {"append_many", "prefill", "free", "gather"}
PAGED = WRITES | {"append_padded", "reserve", "fill"}
OFFERED = {
    DynamicCacheAdapter: WRITES | {"fork", "truncate"},
    PagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena"},
    UnsharedPagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena"},
    ForkedPagedAttentionCacheAdapter: PAGED | {"table", "ledger", "arena", "fork"},
    SlidingPagedAttentionCacheAdapter: PAGED | {"fork"},
}
VERSION = "5.23.0"
"""The version that docs/found.md is about."""
SCRIPTS = scripts_about(f"transformers {VERSION}")


@pytest.fixture(autouse=True)
def short_run() -> Iterator[None]:
    """A few histories, whatever was asked of the run these tests are part of."""
    asked, seen = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=30, steps=10, seed=1))
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(asked)
    coverage.set_current(seen)


@pytest.mark.many_alike
@pytest.mark.parametrize("adapter", OFFERED)
def test_it_conforms(adapter: type[KVCacheAdapter]) -> None:
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
def test_what_it_offers(adapter: type[KVCacheAdapter]) -> None:
    assert adapter.abilities == OFFERED[adapter]


def test_the_suite_runs_it_by_name(project: Project) -> None:
    name = "pytest_roseinfer.targets.dynamic_cache:DynamicCacheAdapter"
    result = project.pytest(
        "--pyargs",
        "pytest_roseinfer.suite",
        f"--roseinfer-target={name}",
        "--roseinfer-examples=5",
    )
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["tested: make *, append *, peek *, *fork *, *append_many *"])


# ----------------------------------------------------------------------------- planted bugs


class LosesTokens(DynamicCacheAdapter):
    """The last token goes when a sequence comes to the end of a block."""

    def new_cache(self) -> Any:
        size = self.spec.block_size

        def update(cache: Any, key: Any, value: Any, layer: int) -> Any:
            DynamicCache.update(cache, key, value, layer)
            stored = cache.layers[layer]
            if stored.keys.shape[-2] % size == 0:
                stored.keys = stored.keys[..., :-1, :]
            return stored.keys, stored.values

        cache = super().new_cache()
        cache.__class__ = type("LosingCache", (DynamicCache,), {"update": update})
        return cache


class SelectsOthers(DynamicCacheAdapter):
    """Rows come back in the order they had, whatever order was asked for."""

    def new_cache(self) -> Any:
        def select(cache: Any, indices: torch.Tensor) -> None:
            DynamicCache.batch_select_indices(cache, indices.sort().values)

        cache = super().new_cache()
        changed = {"batch_select_indices": select, "reorder_cache": select}
        cache.__class__ = type("SortingCache", (DynamicCache,), changed)
        return cache


def planted(base: type[PagedAttentionCacheAdapter], plant: Callable[[Any], None]) -> Any:
    """Return an adapter that breaks its cache as soon as it is made."""

    def make(adapter: PagedAttentionCacheAdapter, spec: CacheSpec) -> None:
        base.make(adapter, spec)
        plant(adapter.cache)

    return type(f"{base.__name__}_{plant.__name__}", (base,), {"make": make})


def lose_the_end_of_a_block(cache: Any) -> None:
    for allocator in cache.cache_allocators.values():
        right = allocator.get_write_indices

        def wrong(
            name: str, past: int, count: int, right: Any = right, allocator: Any = allocator
        ) -> list[int]:
            found: list[int] = right(name, past, count)
            if (past + count) % allocator.tokens_per_page == 0:
                found[-1] = allocator.write_trash_index
            return found

        allocator.get_write_indices = wrong


def leak_a_block(cache: Any) -> None:
    """A request that ends keeps its last block, if it had several."""
    (allocator,) = cache.cache_allocators.values()
    right = allocator.free_blocks

    def wrong(name: str, no_cache: bool = False) -> None:
        allocator.block_table[name][1:] = allocator.block_table[name][1:-1]
        right(name, no_cache)

    allocator.free_blocks = wrong


def forget_to_return_evicted_blocks(cache: Any) -> None:
    (allocator,) = cache.cache_allocators.values()
    right = allocator.ledger.evict_cached_blocks

    def wrong() -> list[int]:
        return list(right()[1:])

    allocator.ledger.evict_cached_blocks = wrong


def share_a_partial_block(cache: Any) -> None:
    for allocator in cache.cache_allocators.values():
        allocator.count_shareable_blocks = lambda name, _, allocator=allocator: len(
            allocator.block_table[name]
        )


def free_a_shared_block(cache: Any) -> None:
    (allocator,) = cache.cache_allocators.values()
    right = allocator.ledger.release

    def wrong(block: int, no_cache: bool = False) -> bool:
        right(block, no_cache)
        return True

    allocator.ledger.release = wrong


def read_a_window_too_far_back(cache: Any) -> None:
    allocator = cache.cache_allocators["sliding_attention"]

    def wrong(name: str, past: int, count: int) -> list[int]:
        window = allocator.sliding_window
        length = min(past, window - 1)
        start = past % window if past >= window else 0
        slots = allocator._token_indices_to_physical_indices(name, start, length)
        return [*slots, *[allocator.sentinel_index] * count]

    allocator.get_read_indices = wrong


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


@pytest.mark.parametrize(
    ("adapter", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_caught(adapter: type[KVCacheAdapter], what: str) -> None:
    settings.set_current(settings.Settings(examples=200, steps=10, seed=1))
    with pytest.raises(Divergence) as failure:
        conformance(adapter)().test_histories()
    assert re.search(what, failure.value.what)


# ------------------------------------------------------------------------------ found bugs

only_that_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"docs/found.md is about transformers {VERSION}"
)


@only_that_version
def test_the_harness_finds_that_a_window_of_one_keeps_everything() -> None:
    class WindowOfOne(DynamicCacheAdapter):
        option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
            **DynamicCacheAdapter.option_choices,
            "window": (1,),
        }

    with pytest.raises(Divergence, match=r"gather: .* expected shape \[\d+, .* found \["):
        conformance(WindowOfOne)().test_histories()


@only_that_version
def test_the_step_that_found_md_names() -> None:
    options = {"layers": "sliding_attention", "window": 1, "select": "reorder_cache"}
    steps = (Prefill(0, 3), Fork(0, 1), Append((0, 1)))
    with pytest.raises(
        Divergence, match=r"gather: .* expected shape \[4, 1, 4\], found \[7, 1, 4\]"
    ) as failure:
        run_history(DynamicCacheAdapter, History(CacheSpec(options=options), steps))
    assert len(failure.value.history.operations) == 3


@only_that_version
@pytest.mark.parametrize(("script", "printed"), SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_script_of_found_md_prints_what_it_says(script: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(script, str(PAGE), "exec"), {})
    assert output.getvalue() == printed
