"""Interrupted steps: computed tokens are correct, and no block or slot is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from roseinfer.decode.slots import DecodeSlots, SlotRows
from roseinfer.decode.step import ResidentDecode
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.storage import IndexStaging
from roseinfer.kv.transfers import PendingReadback, Readback
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
    from roseinfer.engine.request import Request

SLOT_WORK = [
    (DecodeSlots, "assign_slot"),
    (SlotRows, "put_tokens"),
    (DecodeSlots, "upload"),
    (DecodeSlots, "release_slot"),
    (ResidentDecode, "add_sequences"),
    (ResidentDecode, "remove_sequence"),
    (KVBlockManager, "reserve"),
    (Readback, "start"),
    (IndexStaging, "stage"),
]


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1, max_new_tokens=12, seed=seed)


class StepFault(Exception):
    """Error that one call raises."""


def fail_at(call: int, real: Any, when: str = "before") -> Any:
    """Wrap ``real`` so that one of its calls raises, ``before`` or ``after`` it runs."""
    calls = iter(range(1000))

    def call_or_fail(*args: Any, **kwargs: Any) -> Any:
        at = next(calls)
        if at == call and when == "before":
            raise StepFault
        result = real(*args, **kwargs)
        if at == call:
            raise StepFault
        return result

    return call_or_fail


def run_through_faults(llm: LLM) -> int:
    """Step until all requests have ended, whatever steps raise; return the number of errors."""
    raised = 0
    for _ in range(200):
        if not llm.engine.has_work:
            break
        try:
            llm.engine.step()
        except StepFault:
            raised += 1
    return raised


@pytest.mark.sampled_cases
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("call", [0, 1, 4, 7])
@pytest.mark.parametrize("point", ["a forward pass", "reading tokens", "after a resident step"])
def test_interrupted_step_is_repeated(
    device: str, lag: int, call: int, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens in flight are computed again, and none twice."""
    llm = without_token_counts(run_ahead_llm(device, lag))
    engine = llm.engine
    owner, name = {
        "a forward pass": (engine.sequence_runner.model, "logits"),
        "reading tokens": (PendingReadback, "wait"),
        "after a resident step": (engine._runner, "_launch_forward_pass"),
    }[point]
    params = [greedy(6), greedy(), greedy(8, **NEGLIGIBLE_PENALTY), greedy(7)]
    requests = [engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
    monkeypatch.setattr(owner, name, fail_at(call, getattr(owner, name)))
    assert run_through_faults(llm) == 1
    assert [each.token_ids for each in requests] == [
        expected(device, at)[: each.max_new_tokens] for at, each in enumerate(params)
    ]
    assert_no_block_is_lost(llm)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), SLOT_WORK, ids=[name for _, name in SLOT_WORK])
def test_interrupted_step_loses_no_slot(
    device: str, lag: int, when: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests, which take all slots, get the correct tokens twice."""
    params = [greedy(), sampled(1), greedy(), sampled(3)]
    expected_tokens = tokens_of(synchronous_llm(device), PROMPTS, params)
    real = getattr(owner, name)
    for call in (0, 1, 3):
        llm = run_ahead_llm(device, lag, max_batch_size=len(PROMPTS), prefill_max_batch_size=1)
        requests = [llm.engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
        monkeypatch.setattr(owner, name, fail_at(call, real, when))
        raised = run_through_faults(llm)
        monkeypatch.undo()
        assert raised == 1, "the call to fail was never made"
        assert [each.token_ids for each in requests] == expected_tokens
        for _ in range(2):
            assert tokens_of(llm, PROMPTS, params) == expected_tokens
        assert_no_block_is_lost(llm)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, NEGLIGIBLE_PENALTY], ids=str)
def test_nan_logits_end_only_their_request(
    device: str, lag: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others continue, and the blocks of the failed request are not reused."""
    # A graph would not see the replacement.
    llm = without_token_counts(run_ahead_llm(device, lag, cuda_graph=False))
    model = llm.engine.sequence_runner.model
    fatal = next(t for t in expected(device, 0)[2:] if t not in expected(device, 2))
    at = expected(device, 0).index(fatal)
    real = model.logits

    def broken(tokens: torch.Tensor, positions: Any, last_rows: Any, batch: Any) -> torch.Tensor:
        logits = real(tokens, positions, last_rows, batch)
        last = tokens if last_rows is None else tokens[last_rows]
        return torch.where((last == fatal)[:, None], float("nan"), logits)

    monkeypatch.setattr(model, "logits", broken)
    requests: list[Request] = [
        llm.engine.submit(PROMPTS[0], greedy(**more)),
        llm.engine.submit(PROMPTS[2], greedy()),
    ]
    run(llm)
    assert requests[0].finish_reason == "error"
    assert f"logits for token {len(PROMPTS[0]) + at + 1} hold NaN" in str(requests[0].error)
    assert requests[0].token_ids == expected(device, 0)[: at + 1]
    assert requests[1].token_ids == expected(device, 2)
    monkeypatch.undo()
    again = llm.engine.submit(PROMPTS[0] + expected(device, 0)[: at + 1], greedy(3))
    run(llm)
    assert again.num_cached_tokens == 0
    assert again.token_ids == expected(device, 0)[at + 1 :][:3]
    assert_no_block_is_lost(llm)
