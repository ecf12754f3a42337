"""vLLM's scheduler for hybrid models with states: conformance, and planted bugs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import Divergence, conformance, run_history
from pytest_roseinfer.targets.vllm_states import StatesVllmAdapter
from tests.histories.drawn_histories import check_drawn_histories
from tests.others.planted import plant
from tests.others.vllm_sources import searches_vllm

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = "single_type_kv_cache_manager:MambaManager"

pytestmark = searches_vllm


def test_scheduler_conforms() -> None:
    conformance(StatesVllmAdapter)().test_histories()


def finds_prefixes_without_states(_: Callable[..., Any]) -> Callable[..., Any]:
    def find(*_: Any, **named: Any) -> Any:
        count = named["max_length"] // named["kv_cache_spec"].block_size
        blocks = [named["block_pool"].null_block] * count
        groups = tuple(list(blocks) for _ in named["kv_cache_group_ids"])
        return groups, count * named["kv_cache_spec"].block_size

    return classmethod(find)  # type: ignore[return-value]


def copies_no_block(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _: ([], [])


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        pytest.param(
            STATES,
            "find_longest_cache_hit",
            finds_prefixes_without_states,
            id="prefix is found without its state",
        ),
        pytest.param(
            STATES,
            "get_num_skipped_tokens",
            lambda _: lambda _, tokens: tokens + 1,
            id="state is freed a token early",
        ),
        pytest.param(
            "block_pool:BlockPool",
            "_maybe_evict_cached_block",
            lambda _: lambda *_: False,
            id="reused block is still found",
        ),
        pytest.param(
            "kv_cache_manager:KVCacheManager",
            "take_kv_cache_block_copies",
            copies_no_block,
            id="state in part of a block is not copied before it is updated",
        ),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, bug: Any
) -> None:
    plant(monkeypatch, "vllm", f"v1.core.{where}", name, bug)
    with pytest.raises(Divergence):
        check_drawn_histories(StatesVllmAdapter, 500, 1, partial(run_history, StatesVllmAdapter))
