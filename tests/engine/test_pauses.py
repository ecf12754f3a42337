"""Paused and resumed requests: their tokens are the same as without the pause."""

from __future__ import annotations

import random
from typing import Any

import pytest

from roseinfer import SamplingParams
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import (
    PROMPTS,
    expected,
    greedy,
    run,
    run_ahead_llm,
    synchronous_llm,
)

some_lags = pytest.mark.parametrize("lag", [0, 3])
SAMPLING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "logprobs": True},
    {"temperature": 0.9, "top_k": 9, "seed": 8},
]


def params_of(at: int, count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **SAMPLING[at])


@some_lags
@pytest.mark.parametrize("after", [1, 6])
def test_paused_request_gets_only_its_tokens_in_flight(device: str, lag: int, after: int) -> None:
    """The paused request then holds nothing, and the other continues as if alone."""
    llm = run_ahead_llm(device, lag, max_batch_size=2)
    engine = llm.engine
    paused, other = (engine.submit(PROMPTS[at], greedy()) for at in range(2))
    while paused.num_generated < after:
        engine.step()
    engine.pause(paused)
    generated, in_flight = paused.num_generated, paused.num_in_flight
    assert in_flight <= lag
    run(llm)
    assert paused.num_generated == generated + in_flight
    assert (paused.sequence.num_stored, paused.sequence.block_lists) == (0, [[]])
    assert other.token_ids == expected(device, 1)
    assert_no_block_is_lost(llm)
    engine.resume(paused)
    run(llm)
    assert paused.token_ids == expected(device, 0)
    assert_no_block_is_lost(llm)


@pytest.mark.sampled_cases
@some_lags
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pauses_change_no_token(device: str, lag: int, prefix_cache: bool) -> None:
    """This holds although blocks are scarce and other requests are cancelled."""
    rng = random.Random(lag)
    llm = run_ahead_llm(
        device, lag, kv_cache_tokens=28, max_batch_size=3, prefix_cache=prefix_cache
    )
    engine = llm.engine
    requests = [engine.submit(prompt, params_of(at, 12)) for at, prompt in enumerate(PROMPTS)]
    extra = [engine.submit([9, at], greedy(6)) for at in range(3)]
    paused: set[int] = set()
    for now in range(400):
        for at, request in enumerate(requests):
            if rng.random() < 0.25:
                (engine.resume if at in paused else engine.pause)(request)
                paused ^= {at}
        if now == 2:
            engine.pause(extra[1])
            engine.cancel(extra[0])
        if now == 9:
            engine.cancel(extra[1])
        engine.step()
        if not (engine.has_work or paused):
            break
    for request in requests:
        engine.resume(request)
    run(llm)
    alone = synchronous_llm(device)
    for at, request in enumerate(requests):
        reference = alone.engine.submit(PROMPTS[at], params_of(at, 12))
        run(alone)
        assert request.token_ids == reference.token_ids
        assert request.finish_reason == "length"
    assert [each.finish_reason for each in extra] == ["cancelled", "cancelled", "length"]
    assert_no_block_is_lost(llm)


@some_lags
def test_paused_request_can_be_cancelled(device: str, lag: int) -> None:
    llm = run_ahead_llm(device, lag)
    engine = llm.engine
    for steps in range(4):
        request, other = (engine.submit(PROMPTS[at], greedy()) for at in range(2))
        for _ in range(3):
            engine.step()
        engine.pause(request)
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        engine.pause(request)
        engine.resume(request)
        run(llm)
        assert request.finish_reason == "cancelled"
        assert other.token_ids == expected(device, 1)
        assert_no_block_is_lost(llm)


@some_lags
def test_interrupted_step_keeps_paused_requests_paused(
    device: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = run_ahead_llm(device, lag)
    engine = llm.engine
    paused, other = (engine.submit(PROMPTS[at], greedy()) for at in range(2))
    for _ in range(4):
        engine.step()
    engine.pause(paused)

    def broken(_: Any) -> None:
        raise RuntimeError("the GPU stumbled")

    monkeypatch.setattr(engine._runner, "launch", broken)
    with pytest.raises(RuntimeError, match="stumbled"):
        engine.step()
    monkeypatch.undo()
    run(llm)
    assert paused.num_generated < 12
    assert other.token_ids == expected(device, 1)
    engine.resume(paused)
    run(llm)
    assert paused.token_ids == expected(device, 0)
    assert_no_block_is_lost(llm)
