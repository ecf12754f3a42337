"""vLLM's scheduler gives each request what it gets alone; bugs planted under it are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from pytest_roseinfer import MixDivergence, run_mix
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.targets.whole_engines.vllm_scheduler import VllmScheduler
from tests.others.fetch import FOLDER
from tests.others.planted import plant

if TYPE_CHECKING:
    from pytest_roseinfer import RequestMix

THERE = FOLDER / "vllm"
pytestmark = [
    pytest.mark.usefixtures("searching"),
    pytest.mark.skipif(
        not THERE.exists(), reason="vLLM is not there: python -m tests.others.fetch vllm"
    ),
]


@pytest.fixture(autouse=True)
def path_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(THERE)


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


def test_each_request_gets_what_it_gets_alone() -> None:
    serve(300)


def counts_a_token(right: Any) -> Any:
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
            id="a block is found after it was handed out again",
        ),
        pytest.param(
            "single_type_kv_cache_manager:SlidingWindowManager",
            "get_num_skipped_tokens",
            lambda right: lambda manager, tokens: right(manager, tokens + 1),
            id="a block is given back a token early",
        ),
        pytest.param(
            "sched.scheduler:Scheduler",
            "_preempt_request",
            counts_a_token,
            id="a preempted request counts a token as stored",
        ),
    ],
)
def test_a_bug_that_is_planted_under_it_is_found(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, bug: Any
) -> None:
    plant(monkeypatch, "vllm", f"v1.core.{where}", name, bug)
    with pytest.raises(MixDivergence):
        serve(300)
