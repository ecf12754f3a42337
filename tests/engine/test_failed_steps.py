"""Steps whose requests are ended when they break off: the engine goes on with the rest."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, StepFailed
from roseinfer.decode.readback import PendingReadback
from tests.engine.test_interrupted_steps import Mishap, drawn, going_wrong_at
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.engine.test_run_ahead import (
    HARDLY_PENALISED,
    PROMPTS,
    ahead,
    expected,
    greedy,
    in_step,
    run,
    tokens_of,
    without_tallies,
)

if TYPE_CHECKING:
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def run_and_fail(llm: LLM, error: type[Exception] = Mishap) -> tuple[list[Update], int]:
    """Step to the end, and fail each step that raises; return all updates and how many raised."""
    updates: list[Update] = []
    raised = 0
    for _ in range(200):
        if not llm.engine.has_work:
            break
        try:
            updates += llm.engine.step()
        except error as mishap:
            raised += 1
            updates += llm.engine.fail_step(mishap)
    assert not llm.engine.has_work
    return updates, raised


def out_of_memory_at(call: int, real: Any) -> Any:
    """``real``, except that one of its calls finds no memory."""
    calls = iter(range(1000))

    def sometimes(*args: Any) -> Any:
        if next(calls) == call:
            raise OUT_OF_MEMORY
        return real(*args)

    return sometimes


def check_told(requests: list[Request], updates: list[Update], want: list[list[int]]) -> int:
    """Each was told of all its tokens, the right ones, and once of its end; how many failed."""
    failed = 0
    for request, tokens in zip(requests, want, strict=True):
        own = [update for update in updates if update.request is request]
        told = [update.token_id for update in own if update.token_id is not None]
        assert told == request.token_ids
        assert [bool(update.finish_reason) for update in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == request.finish_reason
        if request.error is None:
            assert request.token_ids == tokens
            continue
        failed += 1
        assert isinstance(request.error, StepFailed)
        assert request.finish_reason == "error"
        assert request.token_ids == tokens[: request.num_generated]
    return failed


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("call", [0, 1, 4, 7])
def test_out_of_memory_once_ends_the_requests_of_that_step(
    device: str, lag: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two run. The two that wait go on as if nothing had happened, and all slots are free again."""
    want = [expected(device, at) for at in range(4)]
    llm = ahead(device, lag, max_batch_size=2, cuda_graph=False)
    model = llm.engine.sequence_runner.model
    monkeypatch.setattr(model, "logits", out_of_memory_at(call, model.logits))
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS]
    updates, raised = run_and_fail(llm, torch.OutOfMemoryError)
    assert_no_block_is_lost(llm)
    assert raised == 1
    assert check_told(requests, updates, want) == 2
    failed = [request for request in requests if request.error is not None]
    assert failed == requests[:2]
    for request in failed:
        assert request.error is not None
        assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in str(request.error)
        assert request.error.__cause__ is OUT_OF_MEMORY
    params = [greedy(), drawn(1)]
    assert tokens_of(llm, PROMPTS[:2], params) == tokens_of(in_step(device), PROMPTS[:2], params)


@pytest.mark.many_alike
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    "what", ["reading tokens", "amid tokens", "after a resident step", "a forward pass"]
)
def test_every_token_that_came_is_told_wherever_a_step_breaks(
    device: str, lag: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes tokens that the broken step itself brought, and those of requests it ended."""
    params = [greedy(6), greedy(), greedy(8, **HARDLY_PENALISED), greedy(7)]
    want = [expected(device, at)[: own.max_new_tokens] for at, own in enumerate(params)]
    for call in range(60):
        llm = without_tallies(ahead(device, lag, cuda_graph=False, max_batch_size=3))
        owner, name = {
            "a forward pass": (llm.engine.sequence_runner.model, "logits"),
            "reading tokens": (PendingReadback, "wait"),
            "amid tokens": (llm.engine, "_add_token"),
            "after a resident step": (llm.engine._runner, "_launch_forward_pass"),
        }[what]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, going_wrong_at(call, getattr(owner, name)))
            requests = [llm.engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
            updates, raised = run_and_fail(llm)
        assert_no_block_is_lost(llm)
        failed = check_told(requests, updates, want)
        if not raised:
            break
        assert failed >= 1, "it is done again, and may fail for ever"
    assert 8 <= call < 59, "there are calls that were not tried"


def test_what_a_failed_request_had_stored_is_shared_with_nobody(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step wrote nonsense into the whole cache before it broke off."""
    llm = ahead(device, 0, resident_decode=False)
    sessions, kv = llm.engine.sequence_runner, llm.engine.sequence_runner.kv
    extend = sessions.extend
    calls = iter(range(100))

    def ruins(*arguments: Any, **named: Any) -> Any:
        logits = extend(*arguments, **named)
        if next(calls) == 5:
            kv.keys.fill_(float("nan"))
            kv.values.fill_(float("nan"))
            raise Mishap
        return logits

    monkeypatch.setattr(sessions, "extend", ruins)
    requests = [llm.engine.submit(prompt, greedy()) for prompt in PROMPTS]
    run_and_fail(llm)
    assert [type(request.error) for request in requests] == [StepFailed] * 4
    again = [llm.engine.submit([*prompt, 1], greedy()) for prompt in PROMPTS]
    run(llm)
    assert [request.num_cached_tokens for request in again] == [0] * 4
    assert all(request.error is None for request in again)
    assert_no_block_is_lost(llm)


def test_a_failure_that_is_kept_holds_no_tensors(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the frames of what it came from, and of what that came from."""
    llm = ahead(device, 0, cuda_graph=False)
    tensors: list[Any] = []

    def fails(*_: Any) -> None:
        large = torch.zeros(1000, device=device)
        tensors.append(weakref.ref(large))
        raise OUT_OF_MEMORY

    def fails_in_turn(*_: Any) -> None:
        larger = torch.zeros(2000, device=device)
        tensors.append(weakref.ref(larger))
        try:
            fails()
        except torch.OutOfMemoryError:
            raise Mishap from None

    monkeypatch.setattr(llm.engine.sequence_runner.model, "logits", fails_in_turn)
    request = llm.engine.submit(PROMPTS[0], greedy())
    run_and_fail(llm)
    assert_no_block_is_lost(llm)
    assert isinstance(request.error, StepFailed)
    assert request.error.__cause__ is not None
    assert request.error.__cause__.__traceback__ is not None, "where it happened is kept"
    assert [tensor() for tensor in tensors] == [None, None]
