"""Penalties in steps launched before the previous steps' tokens are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from roseinfer.decode import step as resident_module
from tests.decode.residents import PROMPTS, Decoding, alone, engine_on
from tests.engine.continuations import TEXTS, small_llm

if TYPE_CHECKING:
    from typing import Any

PENALISED = [
    SamplingParams(repetition_penalty=2.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(frequency_penalty=1.5),
    SamplingParams(repetition_penalty=1.3, presence_penalty=-2.0, frequency_penalty=2.0),
]


def by_hand(device: str, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Return the prompt, its argmax token, and the completion by penalised logits."""
    engine = engine_on(device)
    (session,), logits = engine.prefill([prompt])
    session.token_ids += logits.argmax(-1).tolist()
    for _ in range(count - 1):
        row = engine.extend([session])[0].double().tolist()
        for token in set(session.token_ids):
            by = params.repetition_penalty
            row[token] = row[token] / by if row[token] > 0 else row[token] * by
        for token, times in Counter(session.token_ids[len(prompt) :]).items():
            row[token] -= params.presence_penalty + times * params.frequency_penalty
        session.token_ids.append(max(range(len(row)), key=row.__getitem__))
    return session.token_ids


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_each_is_penalised_for_its_own_tokens(device: str, kernels: bool) -> None:
    """They start one after another, next to one without a penalty."""
    decoding = Decoding(device, kernels=kernels)
    for prompt, params in zip(PROMPTS, PENALISED, strict=True):
        decoding.begin(prompt, params)
        decoding.step()
    decoding.begin([9, 9])
    for _ in range(9):
        decoding.step()
    want = [
        by_hand(device, prompt, params, 14 - at)
        for at, (prompt, params) in enumerate(zip(PROMPTS, PENALISED, strict=True))
    ]
    assert decoding.texts() == [*want, alone(device, [9, 9], 10)]
    assert want != [alone(device, prompt, 14 - at) for at, prompt in enumerate(PROMPTS)]
    counts = decoding.sessions.path_counts
    assert counts[EnginePath.PENALTIES] == counts[EnginePath.RESIDENT] == 13
    assert not counts[EnginePath.FUSED_ARGMAX]


def test_a_slot_is_another_sequences_without_what_was_tallied_there(device: str) -> None:
    decoding = Decoding(device)
    first = decoding.begin(PROMPTS[0], PENALISED[3])
    decoding.begin(PROMPTS[1], PENALISED[0])
    for _ in range(6):
        decoding.step()
    decoding.end(first)
    second = decoding.begin(PROMPTS[0], PENALISED[2])
    assert second.slot == first.slot
    for _ in range(6):
        decoding.step()
    assert second.sequence.token_ids == by_hand(device, PROMPTS[0], PENALISED[2], 7)
    decoding.end(second)
    third = decoding.begin(PROMPTS[2])
    for _ in range(4):
        decoding.step()
    assert third.sequence.token_ids == alone(device, PROMPTS[2], 5)
    assert third.slot == first.slot


def test_steps_that_are_launched_before_others_are_read(device: str) -> None:
    decoding = Decoding(device)
    resident = decoding.begin(PROMPTS[0], PENALISED[2])
    on_their_way = [decoding.decode.launch([resident], 0) for _ in range(8)]
    tokens = [each.wait()[resident.slot] for each in on_their_way]
    want = by_hand(device, PROMPTS[0], PENALISED[2], 9)
    assert resident.sequence.token_ids + tokens == want


def test_nothing_is_made_before_a_penalty_comes(device: str) -> None:
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0])
    decoding.step()
    assert decoding.decode.steps.penalties is None
    penalised = decoding.begin(PROMPTS[1], PENALISED[1])
    decoding.step()
    made = decoding.decode.steps.penalties
    assert made is not None
    tallies = made.token_counts.clone()
    decoding.end(penalised)
    for _ in range(3):
        decoding.step()
    assert torch.equal(made.token_counts, tallies)
    assert decoding.sessions.path_counts[EnginePath.PENALTIES] == 1


def test_all_slots_are_taken_back(device: str) -> None:
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0], PENALISED[3])
    decoding.step()
    decoding.decode.clear()
    decoding.running.clear()
    decoding.begin(PROMPTS[1])
    decoding.begin(PROMPTS[2], PENALISED[1])
    for _ in range(4):
        decoding.step()
    want = [alone(device, PROMPTS[1], 5), by_hand(device, PROMPTS[2], PENALISED[1], 5)]
    assert decoding.texts() == want


def served(device: str, **config: Any) -> tuple[list[list[int]], Counter[str]]:
    llm = small_llm(device, **{"resident_decode": True, **config})
    greedy = [replace(each, max_new_tokens=20, ignore_eos=True) for each in PENALISED]
    drawn = [replace(each, temperature=1.5, seed=3, top_p=0.9) for each in greedy]
    outputs = llm.generate(TEXTS[:1] * 8, [*greedy, *drawn], progress=False)
    return [output.token_ids for output in outputs], llm.engine.path_counts


@pytest.mark.parametrize(
    "config", [{}, {"run_ahead": 3}, {"max_batch_size": 3}, {"kv_cache_tokens": 64}], ids=str
)
def test_requests_get_what_they_get_without_slots(device: str, config: dict[str, Any]) -> None:
    """Also if they are preempted, and get a slot when they have generated tokens already."""
    found, counts = served(device, **config)
    slow, none = served(device, **{**config, "resident_decode": False})
    assert found == slow
    assert len({*map(tuple, found)}) >= 7
    assert counts[EnginePath.PENALTIES] >= 19
    assert not none[EnginePath.PENALTIES]
    assert counts[EnginePath.RECOMPUTED] > 0 or "kv_cache_tokens" not in config


def test_without_memory_for_a_tally_requests_decode_by_themselves(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    want, _ = served(device)
    monkeypatch.setattr(resident_module, "SlotPenalties", full)
    found, counts = served(device)
    assert found == want
    assert not counts[EnginePath.PENALTIES]
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        "requests with penalties or guides decode without resident_decode, one step at a time"
    ]
