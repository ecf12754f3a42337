"""Steps launched before the tokens of previous steps are read."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams, tiny_gpt2
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.models.families import VOCABULARY, tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.engine import Update

LAGS = range(5)
all_lags = pytest.mark.parametrize("lag", LAGS)
PROMPTS = [[7, 3, 90, 12], [1], [4, 4, 8, 20, 33, 2], list(range(11))]
ROOM = {"block_size": 4, "kv_cache_tokens": 200}


def greedy(count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, **more)


def run_ahead_llm(device: str, lag: int, model: Any = None, **config: Any) -> LLM:
    """Build an engine that runs ahead, its cache full of NaN."""
    model = tiny("gpt2", device) if model is None else model
    settings = ROOM | {"resident_decode": True, "run_ahead": lag} | config
    llm = LLM(model, device=device, dtype="float32", **settings)
    kv = llm.engine.sequence_runner.kv
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return llm


def without_token_counts(llm: LLM) -> LLM:
    """Make requests with penalties decode outside of the slots, one step at a time.

    This is what happens without memory for token counts.
    """
    resident = llm.engine._runner._resident
    assert resident is not None
    resident._out_of_memory = True
    return llm


NEGLIGIBLE_PENALTY: dict[str, Any] = {"presence_penalty": 1e-9}
"""Penalty that changes no token."""


def synchronous_llm(device: str, model: Any = None, **config: Any) -> LLM:
    """Build an engine that reads each token before it computes the next."""
    return run_ahead_llm(device, 0, model, resident_decode=False, prefix_cache=False, **config)


def tokens_of(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, progress=False)]


@cache
def expected(device: str, at: int, count: int = 12) -> list[int]:
    (tokens,) = tokens_of(synchronous_llm(device), [PROMPTS[at]], greedy(count))
    return tokens


def run(llm: LLM, max_steps: int = 500) -> list[Update]:
    """Step until all requests have ended, and return all updates."""
    updates: list[Update] = []
    for _ in range(max_steps):
        if not llm.engine.has_work:
            return updates
        updates += llm.engine.step()
    raise AssertionError("requests never end")


def model_ending_after(device: str, at: int, count: int) -> tuple[Any, list[int]]:
    """Build a model for which the prompt's ``count``-th new token, or an earlier one, is EOS."""
    model = deepcopy(tiny("gpt2", device))
    tokens = expected(device, at)
    end = tokens[count - 1]
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return model, tokens[: tokens.index(end) + 1]


# ------------------------------------------------------------------------- tokens in flight


@all_lags
def test_stream_lags_by_run_ahead_steps(device: str, lag: int) -> None:
    llm = run_ahead_llm(device, lag)
    request = llm.engine.submit(PROMPTS[0], greedy())
    for step in range(1, 12):
        updates = llm.engine.step()
        assert request.num_generated == max(0, step - lag)
        assert request.num_in_flight == min(step, lag)
        assert len(updates) == (step > lag)
    assert bool(llm.engine.path_counts[EnginePath.RUN_AHEAD]) == (lag > 0)
    run(llm)
    assert request.token_ids == expected(device, 0)


@all_lags
def test_stream_lags_no_more_during_a_long_prefill(device: str, lag: int) -> None:
    """Steps without any token count as steps, too."""
    llm = run_ahead_llm(device, lag, prefill_max_tokens=4, prefix_cache=False)
    request = llm.engine.submit(PROMPTS[1], greedy(6))
    while len(request.sequence.token_ids) + request.num_in_flight < request.max_total_length:
        llm.engine.step()
        if request.num_generated + request.num_in_flight == 3:
            llm.engine.submit(list(range(60)), greedy(1))
    for _ in range(lag):
        llm.engine.step()
    assert request.token_ids == expected(device, 1)[:6]
    assert llm.engine.num_running == 1, "the long prompt is already stored"
    run(llm)


@pytest.mark.sampled_cases
@all_lags
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_max_new_tokens_is_exact(device: str, lag: int, count: int) -> None:
    """No further token is computed: the last is never stored, and its launch frees the slot."""
    llm = run_ahead_llm(device, lag, prefix_cache=False)
    request = llm.engine.submit(PROMPTS[0], greedy(count))
    steps = 0
    longest = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
        longest = max(longest, request.sequence.num_stored)
    assert request.token_ids == expected(device, 0)[:count]
    assert request.finish_reason == "length"
    assert longest <= len(PROMPTS[0]) + count - 1
    assert llm.engine.path_counts[EnginePath.RESIDENT] == count - 1
    assert steps <= count + max(1, lag)
    assert_no_block_is_lost(llm)


@all_lags
def test_generation_stops_at_the_last_position_of_the_model(device: str, lag: int) -> None:
    llm = run_ahead_llm(device, lag, max_length=10)
    request = llm.engine.submit(PROMPTS[0], greedy(99))
    run(llm)
    assert request.token_ids == expected(device, 0)[:6]
    assert request.finish_reason == "length"


@pytest.mark.sampled_cases
@all_lags
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_requests_share_slots(device: str, lag: int, batch: int) -> None:
    llm = run_ahead_llm(device, lag, max_batch_size=batch)
    counts = [5, 1, 12, 7]
    params = [greedy(count) for count in counts]
    actual = tokens_of(llm, PROMPTS, params)
    assert actual == [expected(device, at)[:count] for at, count in enumerate(counts)]
    assert_no_block_is_lost(llm)


# ----------------------------------------------------------------------- ends of completions


@pytest.mark.sampled_cases
@all_lags
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_token_is_streamed_after_eos(device: str, lag: int, count: int) -> None:
    """Later tokens are not cached either: a continuation equals that of a fresh engine."""
    model, expected_tokens = model_ending_after(device, 2, count)
    llm = run_ahead_llm(device, lag, model)
    request = llm.engine.submit(PROMPTS[2], greedy())
    other = llm.engine.submit(PROMPTS[1], greedy(ignore_eos=True))
    updates = run(llm)
    assert request.token_ids == expected_tokens
    assert request.finish_reason == "stop"
    assert [each.token_id for each in updates if each.request is request] == expected_tokens
    assert other.token_ids == expected(device, 1)

    longer = [[*PROMPTS[2], *expected_tokens, token] for token in range(0, VOCABULARY, 30)]
    fresh = tokens_of(synchronous_llm(device), longer, greedy(4))
    for prompt, tokens in zip(longer, fresh, strict=True):
        again = llm.engine.submit(prompt, greedy(4, ignore_eos=True))
        run(llm)
        assert again.num_cached_tokens >= len(PROMPTS[2]) + len(expected_tokens) - 1, (
            "expected the stored prefix to be found"
        )
        assert again.token_ids == tokens
    assert_no_block_is_lost(llm)


@all_lags
def test_no_text_is_streamed_after_a_stop_string(device: str, lag: int) -> None:
    model = tiny_gpt2(device)
    prompt, params = "Once upon a time", greedy(16, ignore_eos=True)
    options = {"tokenizer": model.tokenizer}
    (whole,) = synchronous_llm(device, model.model, **options).generate(
        [prompt], params, progress=False
    )
    assert whole.text
    stop = whole.text[3:5]
    params = greedy(16, ignore_eos=True, stop=(stop,))
    llm = run_ahead_llm(device, lag, model.model, **options)
    streamed = "".join(update.text for update in llm.stream(prompt, params))
    assert streamed == whole.text[: whole.text.index(stop)]
    (again,) = llm.generate([prompt], params, progress=False)
    assert again.text == streamed
    assert_no_block_is_lost(llm)


@all_lags
def test_blocks_of_a_cancelled_request_are_freed_with_tokens_in_flight(
    device: str, lag: int
) -> None:
    llm = run_ahead_llm(device, lag)
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS[:3]]
    for _ in range(4):
        llm.engine.step()
    assert requests[1].num_in_flight == lag
    llm.engine.cancel(requests[1])
    tokens_before = list(requests[1].token_ids)
    updates = run(llm)
    assert all(update.request is not requests[1] for update in updates)
    assert requests[1].token_ids == tokens_before == expected(device, 1)[: 4 - lag]
    assert [requests[at].token_ids for at in (0, 2)] == [expected(device, at) for at in (0, 2)]
    (again,) = tokens_of(llm, [PROMPTS[1] + tokens_before], greedy(8))
    assert again == expected(device, 1)[len(tokens_before) :][:8]
    assert_no_block_is_lost(llm)


def test_cancelling_all_requests_frees_all_blocks(device: str) -> None:
    llm = run_ahead_llm(device, 3)
    for prompt in PROMPTS:
        llm.engine.submit(prompt, greedy())
    for _ in range(3):
        llm.engine.step()
    for request in list(llm.engine._scheduler.running.values()):
        llm.engine.cancel(request)
    assert llm.engine.step() == []
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)
    assert tokens_of(llm, PROMPTS, greedy()) == [expected(device, at) for at in range(4)]


# ------------------------------------------------------------ residents and other requests


@pytest.mark.sampled_cases
@all_lags
@pytest.mark.parametrize("counted", [True, False])
def test_requests_in_slots_and_on_the_host_match_each_alone(
    device: str, lag: int, counted: bool
) -> None:
    """This includes sampled requests: a step's other requests change no result."""
    params = [
        greedy(),
        greedy(9, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=5, max_new_tokens=10, logprobs=True),
        SamplingParams(temperature=0.9, top_k=9, seed=8, max_new_tokens=7),
    ]
    llm = (
        run_ahead_llm(device, lag) if counted else without_token_counts(run_ahead_llm(device, lag))
    )
    outputs = llm.generate(PROMPTS, params, progress=False)
    assert bool(llm.engine.path_counts[EnginePath.PENALTIES]) == counted
    for prompt, each, output in zip(PROMPTS, params, outputs, strict=True):
        (alone,) = synchronous_llm(device).generate([prompt], each, progress=False)
        assert output.token_ids == alone.token_ids
        assert (output.logprobs is None) == (alone.logprobs is None)
        if output.logprobs and alone.logprobs:
            torch.testing.assert_close(
                torch.tensor(output.logprobs), torch.tensor(alone.logprobs), atol=1e-4, rtol=1e-4
            )


@pytest.mark.sampled_cases
@all_lags
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_request_continues_its_completion(
    device: str, lag: int, prefix_cache: bool
) -> None:
    llm = run_ahead_llm(device, lag, kv_cache_tokens=24, prefix_cache=prefix_cache)
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS]
    run(llm)
    assert [each.token_ids for each in requests] == [expected(device, at) for at in range(4)]
    assert sum(each.times_preempted for each in requests) > 0
    assert (llm.engine.path_counts[EnginePath.CUDA_GRAPH] > 0) == (device == "cuda")
    assert_no_block_is_lost(llm)


def test_no_request_is_admitted_while_running_ones_lack_a_block(device: str) -> None:
    """The request to preempt is only known once the tokens in flight have been read."""
    llm = run_ahead_llm(device, 2, kv_cache_tokens=12, prefix_cache=False)
    running = [llm.engine.submit(PROMPTS[0], greedy(4)), llm.engine.submit([5] * 4, greedy(4))]
    llm.engine.step()
    late = llm.engine.submit([9], greedy(1))
    llm.engine.step()
    assert late.sequence.num_stored == 0
    assert llm.engine.num_waiting == 1
    assert all(each.num_generated == 1 and not each.num_in_flight for each in running)
    run(llm)
    assert running[0].token_ids == expected(device, 0)[:4]
    assert running[0].times_preempted == 0
