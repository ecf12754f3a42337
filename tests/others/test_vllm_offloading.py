"""vLLM's offloading manager as a tier below its block manager: conformance, and planted bugs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import Divergence, conformance, run_history
from pytest_roseinfer.targets.vllm_offloading import OffloadingVllmAdapter
from tests.histories.drawn_histories import check_drawn_histories
from tests.others.planted import plant
from tests.others.vllm_sources import searches_vllm

if TYPE_CHECKING:
    from collections.abc import Callable

MANAGER = "cpu.manager:CPUOffloadingManager"
LRU = "cpu.policies.lru:LRUCachePolicy"

pytestmark = searches_vllm


def test_offloading_manager_conforms() -> None:
    conformance(OffloadingVllmAdapter)().test_histories()


def shows_failed_stores(right: Callable[..., None]) -> Callable[..., None]:
    return lambda manager, keys, context, success=True: right(manager, keys, context)  # noqa: ARG005


def keeps_evicted_keys(right: Callable[..., Any]) -> Callable[..., Any]:
    def evict(policy: Any, count: int, protected: Any) -> Any:
        evicted = right(policy, count, protected)
        policy.chunks |= dict(evicted or ())
        return evicted

    return evict


def reverses_chunks(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda manager, keys, chunks: right(manager, keys, list(chunks)[::-1])


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        pytest.param(MANAGER, "complete_store", shows_failed_stores, id="failed store is shown"),
        pytest.param(MANAGER, "_get_load_store_spec", reverses_chunks, id="chunks are reversed"),
        pytest.param(LRU, "evict", keeps_evicted_keys, id="evicted block is still found"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, bug: Any
) -> None:
    plant(monkeypatch, "vllm", f"v1.kv_offload.{where}", name, bug)
    run = partial(run_history, OffloadingVllmAdapter)
    with pytest.raises(Divergence):
        check_drawn_histories(OffloadingVllmAdapter, 300, 1, run)
