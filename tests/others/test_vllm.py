"""vLLM's block manager, with and without windows: conformance, and planted bugs."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance, run_history
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.partial_import import import_part
from pytest_roseinfer.targets.vllm_kv import (
    EventsVllmAdapter,
    KeyedVllmAdapter,
    VllmAdapter,
    WindowsVllmAdapter,
)
from tests.histories.drawn_histories import check_drawn_histories
from tests.others.planted import plant
from tests.others.vllm_sources import needs_vllm

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

MANAGER = "single_type_kv_cache_manager:SingleTypeKVCacheManager"
WINDOWS = "single_type_kv_cache_manager:SlidingWindowManager"

pytestmark = pytest.mark.usefixtures("vllm_sources")


@needs_vllm
@pytest.mark.parametrize("adapter", [VllmAdapter, KeyedVllmAdapter, WindowsVllmAdapter])
def test_block_manager_conforms(adapter: type[KVCacheAdapter]) -> None:
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@needs_vllm
@pytest.mark.parametrize(
    ("adapter", "where", "name", "bug"),
    [
        pytest.param(
            VllmAdapter,
            MANAGER,
            "_get_num_evictable_blocks",
            lambda _: classmethod(lambda *_: 0),
            id="free cached blocks are not counted",
        ),
        pytest.param(
            VllmAdapter,
            "block_pool:BlockPool",
            "_maybe_evict_cached_block",
            lambda _: lambda *_: False,
            id="reused block is still found",
        ),
        pytest.param(
            VllmAdapter,
            "block_pool:BlockPool",
            "free_blocks",
            lambda right: lambda pool, blocks: right(pool, list(blocks)[::-1]),
            id="first blocks of a sequence are evicted before its last",
        ),
        pytest.param(
            VllmAdapter,
            "block_pool:BlockPool",
            "reset_prefix_cache",
            lambda _: lambda pool: pool.get_num_free_blocks() + 1 == pool.num_gpu_blocks,
            id="reset leaves what was stored to be found",
        ),
        pytest.param(
            WindowsVllmAdapter,
            WINDOWS,
            "_contiguous_blocks_for_hit",
            lambda right: classmethod(lambda _, *sizes: max(1, right(*sizes) - 1)),
            id="prefix hit lacks a block of the window",
        ),
        pytest.param(
            WindowsVllmAdapter,
            WINDOWS,
            "get_num_skipped_tokens",
            lambda right: lambda manager, tokens: right(manager, tokens + 1),
            id="block is freed a token early",
        ),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    adapter: type[KVCacheAdapter],
    where: str,
    name: str,
    bug: Any,
) -> None:
    plant(monkeypatch, "vllm", f"v1.core.{where}", name, bug)
    with pytest.raises(Divergence):
        check_drawn_histories(adapter, 500, 1, partial(run_history, adapter))


@needs_vllm
@pytest.mark.parametrize(
    ("part", "bug", "name"),
    [
        ("lora", lambda _: [], "adapter"),
        (
            "lora",
            lambda request: [each[:2] for each in right_lora_keys(request)],
            "path",
        ),
        ("mm", lambda *place: ([], place[-1]), "image"),
    ],
)
def test_part_left_out_of_a_key_is_found(
    monkeypatch: pytest.MonkeyPatch, part: str, bug: Any, name: str
) -> None:
    keys = import_part("vllm", "v1.core.kv_cache_utils", "")
    monkeypatch.setattr(keys, f"_gen_{part}_extra_hash_keys", bug)
    with pytest.raises(Divergence, match=f"their {name}"):
        check_drawn_histories(KeyedVllmAdapter, 500, 1, partial(run_history, KeyedVllmAdapter))


def right_lora_keys(request: Any) -> list[tuple[str, ...]]:
    lora = request.lora_request
    return [("lora", lora.lora_name, lora.lora_path)] if lora else []


@needs_vllm
def test_removed_event_of_a_block_with_a_copy_is_found() -> None:
    with pytest.raises(Divergence, match=r"by its events, the cache stores \d+ tokens .* finds"):
        check_drawn_histories(EventsVllmAdapter, 500, 1, partial(run_history, EventsVllmAdapter))


def test_missing_package_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"vllm is not installed: run python -m .* vllm"):
        VllmAdapter().make(CacheSpec())
