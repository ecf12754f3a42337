"""Failing steps: their requests end with an error, and the engine serves the others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, StepFailed
from roseinfer.kv.transfers import PendingReadback
from tests.engine.test_interrupted_steps import StepFault, fail_at, sampled
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import (
    NEGLIGIBLE_PENALTY,
    PROMPTS,
    expected,
    greedy,
    run,
    run_ahead_llm,
    synchronous_llm,
    tokens_of,
    without_token_counts,
)

if TYPE_CHECKING:
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def run_and_fail_steps(llm: LLM, error: type[Exception] = StepFault) -> tuple[list[Update], int]:
    """Step to the end, and fail each step that raises; return updates and the number of errors."""
    updates: list[Update] = []
    raised = 0
    for _ in range(200):
        if not llm.engine.has_work:
            break
        try:
            updates += llm.engine.step()
        except error as fault:
            raised += 1
            updates += llm.engine.fail_step(fault)
    assert not llm.engine.has_work
    return updates, raised


def out_of_memory_at(call: int, real: Any) -> Any:
    """Wrap ``real`` so that one of its calls raises out of memory."""
    calls = iter(range(1000))

    def call_or_fail(*args: Any) -> Any:
        if next(calls) == call:
            raise OUT_OF_MEMORY
        return real(*args)

    return call_or_fail


def check_updates(
    requests: list[Request], updates: list[Update], expected_tokens: list[list[int]]
) -> int:
    """Check each request's updates: all its tokens, correct, and one end; count failures."""
    failed = 0
    for request, tokens in zip(requests, expected_tokens, strict=True):
        own_updates = [update for update in updates if update.request is request]
        streamed = [update.token_id for update in own_updates if update.token_id is not None]
        assert streamed == request.token_ids
        assert [bool(update.finish_reason) for update in own_updates] == [False] * (
            len(own_updates) - 1
        ) + [True]
        assert own_updates[-1].finish_reason == request.finish_reason
        if request.error is None:
            assert request.token_ids == tokens
            continue
        failed += 1
        assert isinstance(request.error, StepFailed)
        assert request.finish_reason == "error"
        assert request.token_ids == tokens[: request.num_generated]
    return failed


@pytest.mark.sampled_cases
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("call", [0, 1, 4, 7])
def test_out_of_memory_ends_only_the_requests_of_its_step(
    device: str, lag: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests run. The two waiting ones are unaffected, and all slots are free again."""
    expected_tokens = [expected(device, at) for at in range(4)]
    llm = run_ahead_llm(device, lag, max_batch_size=2, cuda_graph=False)
    model = llm.engine.sequence_runner.model
    monkeypatch.setattr(model, "logits", out_of_memory_at(call, model.logits))
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS]
    updates, raised = run_and_fail_steps(llm, torch.OutOfMemoryError)
    assert_no_block_is_lost(llm)
    assert raised == 1
    assert check_updates(requests, updates, expected_tokens) == 2
    failed = [request for request in requests if request.error is not None]
    assert failed == requests[:2]
    for request in failed:
        assert request.error is not None
        assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in str(request.error)
        assert request.error.__cause__ is OUT_OF_MEMORY
    params = [greedy(), sampled(1)]
    assert tokens_of(llm, PROMPTS[:2], params) == tokens_of(
        synchronous_llm(device), PROMPTS[:2], params
    )


@pytest.mark.sampled_cases
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    "point", ["reading tokens", "between tokens", "after a resident step", "a forward pass"]
)
def test_every_computed_token_is_streamed_wherever_a_step_fails(
    device: str, lag: int, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes tokens of the failing step itself, and tokens of requests that it ended."""
    params = [greedy(6), greedy(), greedy(8, **NEGLIGIBLE_PENALTY), greedy(7)]
    expected_tokens = [
        expected(device, at)[: each.max_new_tokens] for at, each in enumerate(params)
    ]
    for call in range(60):
        llm = without_token_counts(run_ahead_llm(device, lag, cuda_graph=False, max_batch_size=3))
        owner, name = {
            "a forward pass": (llm.engine.sequence_runner.model, "logits"),
            "reading tokens": (PendingReadback, "wait"),
            "between tokens": (llm.engine, "_add_token"),
            "after a resident step": (llm.engine._runner, "_launch_forward_pass"),
        }[point]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_at(call, getattr(owner, name)))
            requests = [llm.engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
            updates, raised = run_and_fail_steps(llm)
        assert_no_block_is_lost(llm)
        failed = check_updates(requests, updates, expected_tokens)
        if not raised:
            break
        assert failed >= 1, "no request ended: the step is retried and may fail forever"
    assert 8 <= call < 59, "not every call was tried"


def test_blocks_of_a_failed_request_are_not_reused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step filled the whole cache with NaN before it failed."""
    llm = run_ahead_llm(device, 0, resident_decode=False)
    sessions, kv = llm.engine.sequence_runner, llm.engine.sequence_runner.kv
    forward = sessions.forward
    calls = iter(range(100))

    def corrupt_and_fail(*arguments: Any, **named: Any) -> Any:
        logits = forward(*arguments, **named)
        if next(calls) == 5:
            kv.keys.fill_(float("nan"))
            kv.values.fill_(float("nan"))
            raise StepFault
        return logits

    monkeypatch.setattr(sessions, "forward", corrupt_and_fail)
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS]
    run_and_fail_steps(llm)
    assert [type(request.error) for request in requests] == [StepFailed] * 4
    again = [llm.engine.submit([*prompt, 1], greedy()) for prompt in PROMPTS]
    run(llm)
    assert [request.num_cached_tokens for request in again] == [0] * 4
    assert all(request.error is None for request in again)
    assert_no_block_is_lost(llm)


def test_stored_error_references_no_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers frames of the error's cause, and of the cause's own cause."""
    llm = run_ahead_llm(device, 0, cuda_graph=False)
    tensors: list[Any] = []

    def raise_out_of_memory(*_: Any) -> None:
        large = torch.zeros(1000, device=device)
        tensors.append(weakref.ref(large))
        raise OUT_OF_MEMORY

    def raise_from_out_of_memory(*_: Any) -> None:
        larger = torch.zeros(2000, device=device)
        tensors.append(weakref.ref(larger))
        try:
            raise_out_of_memory()
        except torch.OutOfMemoryError:
            raise StepFault from None

    monkeypatch.setattr(llm.engine.sequence_runner.model, "logits", raise_from_out_of_memory)
    request = llm.engine.submit(PROMPTS[0], greedy())
    run_and_fail_steps(llm)
    assert_no_block_is_lost(llm)
    assert isinstance(request.error, StepFailed)
    assert request.error.__cause__ is not None
    assert request.error.__cause__.__traceback__ is not None, "the traceback is lost"
    assert [tensor() for tensor in tensors] == [None, None]
