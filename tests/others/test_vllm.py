"""vLLM's block manager conforms, with and without windows; bugs planted into it are found."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, conformance, run_history
from pytest_roseinfer.targets import partial_import
from pytest_roseinfer.targets.vllm_kv import VllmAdapter, WindowsVllmAdapter
from tests.histories.drawn import drawn
from tests.others.fetch import FOLDER
from tests.others.planted import plant

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

THERE = FOLDER / "vllm"
MANAGER = "single_type_kv_cache_manager:SingleTypeKVCacheManager"
WINDOWS = "single_type_kv_cache_manager:SlidingWindowManager"

pytestmark = pytest.mark.usefixtures("searching")
needs_it = pytest.mark.skipif(
    not THERE.exists(), reason="vLLM is not there: python -m tests.others.fetch vllm"
)


@pytest.fixture(autouse=True)
def path_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(THERE)


@needs_it
@pytest.mark.parametrize("adapter", [VllmAdapter, WindowsVllmAdapter])
def test_it_conforms(adapter: type[KVCacheAdapter]) -> None:
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@needs_it
@pytest.mark.parametrize(
    ("adapter", "where", "name", "bug"),
    [
        pytest.param(
            VllmAdapter,
            MANAGER,
            "_get_num_evictable_blocks",
            lambda _: classmethod(lambda *_: 0),
            id="found blocks that are free are not counted",
        ),
        pytest.param(
            VllmAdapter,
            "block_pool:BlockPool",
            "_maybe_evict_cached_block",
            lambda _: lambda *_: False,
            id="a block is found after it was handed out again",
        ),
        pytest.param(
            VllmAdapter,
            "block_pool:BlockPool",
            "free_blocks",
            lambda right: lambda pool, blocks: right(pool, list(blocks)[::-1]),
            id="the head of a sequence is evicted before its tail",
        ),
        pytest.param(
            WindowsVllmAdapter,
            WINDOWS,
            "_contiguous_blocks_for_hit",
            lambda right: classmethod(lambda _, *sizes: max(1, right(*sizes) - 1)),
            id="a block of the window is missing from what is found",
        ),
        pytest.param(
            WindowsVllmAdapter,
            WINDOWS,
            "get_num_skipped_tokens",
            lambda right: lambda manager, tokens: right(manager, tokens + 1),
            id="a block is given back a token early",
        ),
    ],
)
def test_a_bug_that_is_planted_in_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
    adapter: type[KVCacheAdapter],
    where: str,
    name: str,
    bug: Any,
) -> None:
    plant(monkeypatch, "vllm", f"v1.core.{where}", name, bug)
    with pytest.raises(Divergence):
        drawn(adapter, 500, 1, partial(run_history, adapter))


def test_where_it_is_missing_the_adapter_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(partial_import, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"vllm is not installed: run python -m .* vllm"):
        VllmAdapter().make(CacheSpec())
