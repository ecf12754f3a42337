"""vLLM's NIXL connector: prompts received from a prefill engine; conformance, and planted bugs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import Divergence, conformance, run_history
from pytest_roseinfer.targets.vllm_nixl import (
    BlockSizesNixlVllmAdapter,
    CachingNixlVllmAdapter,
    NixlVllmAdapter,
)
from pytest_roseinfer.targets.vllm_nixl_engine import nixl_part
from tests.histories.drawn_histories import check_drawn_histories
from tests.others.planted import plant
from tests.others.vllm_sources import searches_vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import KVCacheAdapter

NIXL = "distributed.kv_transfer.kv_connector.v1.nixl"
PULL = f"{NIXL}.pull_worker:NixlPullConnectorWorker"
WORKER = f"{NIXL}.base_worker:NixlBaseConnectorWorker"
SCHEDULER = "v1.core.sched.scheduler:Scheduler"

pytestmark = searches_vllm


@pytest.fixture(autouse=True)
def connector(vllm_sources: None) -> None:  # noqa: ARG001
    """Import the connector once with what it lacks, so that bugs can be planted."""
    nixl_part("pull_worker")


@pytest.mark.parametrize("adapter", [NixlVllmAdapter, BlockSizesNixlVllmAdapter])
def test_connector_conforms(adapter: type[KVCacheAdapter]) -> None:
    conformance(adapter)().test_histories()


def test_prefix_before_a_last_block_in_part_is_found_to_be_misread() -> None:
    with pytest.raises(Divergence, match="expected text"):
        check_drawn_histories(
            CachingNixlVllmAdapter, 500, 1, partial(run_history, CachingNixlVllmAdapter)
        )


def reports_failures_as_done(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda worker, name, handle, *_, **__: (
        handle is None or worker._try_release_xfer_handle(name, handle)
    )


def counts_one_reader(right: Callable[..., Any]) -> Callable[..., Any]:
    def read(worker: Any, **named: Any) -> Any:
        return right(worker, **named | {"expected_consumers": 1})

    return read


def reads_from_the_first_block(right: Callable[..., Any]) -> Callable[..., Any]:
    def trim(worker: Any, decode_block_ids: Any, prefill_block_ids: Any, **sizes: Any) -> Any:
        counts = [len(group) for group in decode_block_ids]
        pairs = zip(prefill_block_ids, counts, strict=True)
        first = [group[:count] for group, count in pairs]
        return right(worker, decode_block_ids, first, **sizes)

    return trim


def swaps_heads_of_ranks(right: Callable[..., Any]) -> Callable[..., Any]:
    def split(worker: Any, plan: Any, *rest: Any) -> Any:
        slots = {
            rank: len(plan.rank_to_attention_slot) - 1 - slot
            for rank, slot in plan.rank_to_attention_slot.items()
        }
        return right(worker, replace(plan, rank_to_attention_slot=slots), *rest)

    return split


def keeps_the_order_of_a_small_block(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_, **__: None


def frees_under_a_read(right: Callable[..., Any]) -> Callable[..., Any]:
    def free(scheduler: Any, request: Any, delay_free_blocks: bool = False) -> Any:  # noqa: ARG001
        answer = right(scheduler, request)
        if request.request_id not in scheduler.requests:
            scheduler.requests[request.request_id] = request  # the connector still names it
        return answer

    return free


def counts_failed_tokens_as_computed(right: Callable[..., Any]) -> Callable[..., Any]:
    def update(scheduler: Any, request: Any) -> None:
        right(scheduler, request)
        request.num_computed_tokens = request.num_tokens - 1

    return update


def never_notifies_of_an_abort(right: Callable[..., Any]) -> Callable[..., Any]:
    def finished(scheduler: Any, request: Any, block_ids: Any) -> Any:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return False, None
        return right(scheduler, request, block_ids)

    return finished


@pytest.mark.parametrize(
    ("adapter", "where", "name", "bug"),
    [
        pytest.param(
            NixlVllmAdapter,
            WORKER,
            "_handle_failed_transfer",
            reports_failures_as_done,
            id="failed read is reported as done",
        ),
        pytest.param(
            NixlVllmAdapter,
            PULL,
            "_read_blocks",
            counts_one_reader,
            id="prompt is freed after the first of two readers",
        ),
        pytest.param(
            NixlVllmAdapter,
            WORKER,
            "_apply_prefix_caching",
            reads_from_the_first_block,
            id="prefix is read in place of what follows it",
        ),
        pytest.param(
            NixlVllmAdapter,
            WORKER,
            "_build_local_splits_from_plan",
            swaps_heads_of_ranks,
            id="heads of two ranks are swapped",
        ),
        pytest.param(
            BlockSizesNixlVllmAdapter,
            WORKER,
            "post_process_device_kv_on_receive",
            keeps_the_order_of_a_small_block,
            id="heads of smaller blocks are not reordered",
        ),
        pytest.param(
            NixlVllmAdapter,
            SCHEDULER,
            "_free_request",
            frees_under_a_read,
            id="blocks are freed under a read in flight",
        ),
        pytest.param(
            NixlVllmAdapter,
            SCHEDULER,
            "_update_waiting_for_remote_kv",
            counts_failed_tokens_as_computed,
            id="failed request is not recomputed",
        ),
        pytest.param(
            NixlVllmAdapter,
            f"{NIXL}.pull_scheduler:NixlPullConnectorScheduler",
            "request_finished",
            never_notifies_of_an_abort,
            id="prefill engine is not notified of an abort",
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
    plant(monkeypatch, "vllm", where, name, bug)
    with pytest.raises(Divergence):
        check_drawn_histories(adapter, 500, 1, partial(run_history, adapter))
