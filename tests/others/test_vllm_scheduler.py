"""vLLM's scheduler: output that does not depend on the batch, and planted bugs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from pytest_roseinfer import MixDivergence, run_mix
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.targets.vllm_scheduler import VllmScheduler
from tests.others.planted import plant
from tests.others.vllm_sources import searches_vllm

if TYPE_CHECKING:
    from pytest_roseinfer import RequestMix

pytestmark = searches_vllm


def serve(mixes: int) -> None:
    @seed(1)
    @settings(
        max_examples=mixes,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(request_mixes(VllmScheduler))
    def attempt(mix: RequestMix) -> None:
        run_mix(VllmScheduler, mix)

    attempt()


def test_output_does_not_depend_on_the_batch() -> None:
    serve(300)


def counts_a_token_as_stored(right: Any) -> Any:
    def preempt(scheduler: Any, request: Any, *rest: Any) -> None:
        right(scheduler, request, *rest)
        request.num_computed_tokens = 1

    return preempt


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        pytest.param(
            "block_pool:BlockPool",
            "_maybe_evict_cached_block",
            lambda _: lambda *_: False,
            id="reused block is still found",
        ),
        pytest.param(
            "single_type_kv_cache_manager:SlidingWindowManager",
            "get_num_skipped_tokens",
            lambda right: lambda manager, tokens: right(manager, tokens + 1),
            id="block is freed a token early",
        ),
        pytest.param(
            "sched.scheduler:Scheduler",
            "_preempt_request",
            counts_a_token_as_stored,
            id="preempted request counts a token as stored",
        ),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, bug: Any
) -> None:
    plant(monkeypatch, "vllm", f"v1.core.{where}", name, bug)
    with pytest.raises(MixDivergence):
        serve(300)
