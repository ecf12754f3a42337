"""Steps that break off, wherever they do: what was computed is right, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from roseinfer.decode.readback import PendingReadback, Readback
from roseinfer.decode.slots import DecodeSlots, SlotRows
from roseinfer.decode.step import ResidentDecode
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.storage import IndexStaging
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


def drawn(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1, max_new_tokens=12, seed=seed)


class Mishap(Exception):
    """One call fails with this."""


def going_wrong_at(call: int, real: Any, when: str = "before") -> Any:
    """``real``, except that one of its calls raises, ``before`` or ``after`` it is carried out."""
    calls = iter(range(1000))

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        at = next(calls)
        if at == call and when == "before":
            raise Mishap
        result = real(*args, **kwargs)
        if at == call:
            raise Mishap
        return result

    return sometimes


def run_through(llm: LLM) -> int:
    """Step until all is done, whatever steps raise; return how many raised."""
    raised = 0
    for _ in range(200):
        if not llm.engine.has_work:
            break
        try:
            llm.engine.step()
        except Mishap:
            raised += 1
    return raised


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("call", [0, 1, 4, 7])
@pytest.mark.parametrize("what", ["a forward pass", "reading tokens", "after a resident step"])
def test_a_step_that_raises_is_done_again(
    device: str, lag: int, call: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was. Tokens that were on their way are computed again, and none twice."""
    llm = without_tallies(ahead(device, lag))
    engine = llm.engine
    owner, name = {
        "a forward pass": (engine.sequence_runner.model, "logits"),
        "reading tokens": (PendingReadback, "wait"),
        "after a resident step": (engine._runner, "_launch_forward_pass"),
    }[what]
    params = [greedy(6), greedy(), greedy(8, **HARDLY_PENALISED), greedy(7)]
    requests = [engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
    monkeypatch.setattr(owner, name, going_wrong_at(call, getattr(owner, name)))
    assert run_through(llm) == 1
    assert [each.token_ids for each in requests] == [
        expected(device, at)[: own.max_new_tokens] for at, own in enumerate(params)
    ]
    assert_no_block_is_lost(llm)


@pytest.mark.many_alike
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), SLOT_WORK, ids=[name for _, name in SLOT_WORK])
def test_no_slot_is_lost_by_a_step_that_raises(
    device: str, lag: int, when: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor had by two: later requests, who take all slots there are, get what is theirs."""
    params = [greedy(), drawn(1), greedy(), drawn(3)]
    want = tokens_of(in_step(device), PROMPTS, params)
    real = getattr(owner, name)
    for call in (0, 1, 3):
        llm = ahead(device, lag, max_batch_size=len(PROMPTS), prefill_max_batch_size=1)
        requests = [llm.engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
        monkeypatch.setattr(owner, name, going_wrong_at(call, real, when))
        raised = run_through(llm)
        monkeypatch.undo()
        assert raised == 1, "that call is never made"
        assert [each.token_ids for each in requests] == want
        for _ in range(2):
            assert tokens_of(llm, PROMPTS, params) == want
        assert_no_block_is_lost(llm)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, HARDLY_PENALISED], ids=str)
def test_logits_without_a_distribution_end_one_request(
    device: str, lag: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, and what it stored is kept from them."""
    # No graph remembers what is put in its place.
    llm = without_tallies(ahead(device, lag, cuda_graph=False))
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
