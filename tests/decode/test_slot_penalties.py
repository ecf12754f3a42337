"""Penalties in steps launched before the previous steps' tokens are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from roseinfer.decode import step as resident_module
from tests.decode.residents import PROMPTS, Decoding, alone, build_runner
from tests.engine.continuations import TEXTS, small_llm

if TYPE_CHECKING:
    from typing import Any

WITH_PENALTIES = [
    SamplingParams(repetition_penalty=2.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(frequency_penalty=1.5),
    SamplingParams(repetition_penalty=1.3, presence_penalty=-2.0, frequency_penalty=2.0),
]


def reference_completion(
    device: str, prompt: list[int], params: SamplingParams, count: int
) -> list[int]:
    """Return the prompt, its argmax token, and the completion by penalized logits."""
    engine = build_runner(device)
    (session,), logits = engine.prefill([prompt])
    session.token_ids += logits.argmax(-1).tolist()
    for _ in range(count - 1):
        row = engine.extend([session])[0].double().tolist()
        for token in set(session.token_ids):
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token, count_of_token in Counter(session.token_ids[len(prompt) :]).items():
            row[token] -= params.presence_penalty + count_of_token * params.frequency_penalty
        session.token_ids.append(max(range(len(row)), key=row.__getitem__))
    return session.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_sequences_are_penalized_for_their_own_tokens(device: str, kernels: bool) -> None:
    """The sequences start one after another, next to one without a penalty."""
    decoding = Decoding(device, kernels=kernels)
    for prompt, params in zip(PROMPTS, WITH_PENALTIES, strict=True):
        decoding.begin(prompt, params)
        decoding.step()
    decoding.begin([9, 9])
    for _ in range(9):
        decoding.step()
    expected = [
        reference_completion(device, prompt, params, 14 - at)
        for at, (prompt, params) in enumerate(zip(PROMPTS, WITH_PENALTIES, strict=True))
    ]
    assert decoding.texts() == [*expected, alone(device, [9, 9], 10)]
    assert expected != [alone(device, prompt, 14 - at) for at, prompt in enumerate(PROMPTS)]
    counts = decoding.sessions.path_counts
    assert counts[EnginePath.PENALTIES] == counts[EnginePath.RESIDENT] == 13
    assert not counts[EnginePath.FUSED_ARGMAX]


def test_reused_slot_starts_without_token_counts(device: str) -> None:
    decoding = Decoding(device)
    first = decoding.begin(PROMPTS[0], WITH_PENALTIES[3])
    decoding.begin(PROMPTS[1], WITH_PENALTIES[0])
    for _ in range(6):
        decoding.step()
    decoding.end(first)
    second = decoding.begin(PROMPTS[0], WITH_PENALTIES[2])
    assert second.slot == first.slot
    for _ in range(6):
        decoding.step()
    assert second.sequence.token_ids == reference_completion(
        device, PROMPTS[0], WITH_PENALTIES[2], 7
    )
    decoding.end(second)
    third = decoding.begin(PROMPTS[2])
    for _ in range(4):
        decoding.step()
    assert third.sequence.token_ids == alone(device, PROMPTS[2], 5)
    assert third.slot == first.slot


def test_penalties_apply_to_steps_launched_before_previous_ones_are_read(device: str) -> None:
    decoding = Decoding(device)
    resident = decoding.begin(PROMPTS[0], WITH_PENALTIES[2])
    in_flight = [decoding.decode.launch([resident], 0) for _ in range(8)]
    tokens = [each.wait()[resident.slot] for each in in_flight]
    expected = reference_completion(device, PROMPTS[0], WITH_PENALTIES[2], 9)
    assert resident.sequence.token_ids + tokens == expected


def test_penalties_are_allocated_on_first_use(device: str) -> None:
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0])
    decoding.step()
    assert decoding.decode.steps.penalties is None
    with_penalty = decoding.begin(PROMPTS[1], WITH_PENALTIES[1])
    decoding.step()
    penalties = decoding.decode.steps.penalties
    assert penalties is not None
    counts_before = penalties.token_counts.clone()
    decoding.end(with_penalty)
    for _ in range(3):
        decoding.step()
    assert torch.equal(penalties.token_counts, counts_before)
    assert decoding.sessions.path_counts[EnginePath.PENALTIES] == 1


def test_cleared_slots_start_without_token_counts(device: str) -> None:
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0], WITH_PENALTIES[3])
    decoding.step()
    decoding.decode.clear()
    decoding.running.clear()
    decoding.begin(PROMPTS[1])
    decoding.begin(PROMPTS[2], WITH_PENALTIES[1])
    for _ in range(4):
        decoding.step()
    expected = [
        alone(device, PROMPTS[1], 5),
        reference_completion(device, PROMPTS[2], WITH_PENALTIES[1], 5),
    ]
    assert decoding.texts() == expected


def generate(device: str, **config: Any) -> tuple[list[list[int]], Counter[str]]:
    llm = small_llm(device, **{"resident_decode": True, **config})
    greedy = [replace(each, max_new_tokens=20, ignore_eos=True) for each in WITH_PENALTIES]
    sampled = [replace(each, temperature=1.5, seed=3, top_p=0.9) for each in greedy]
    outputs = llm.generate(TEXTS[:1] * 8, [*greedy, *sampled], progress=False)
    return [output.token_ids for output in outputs], llm.engine.path_counts


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "config", [{}, {"run_ahead": 3}, {"max_batch_size": 3}, {"kv_cache_tokens": 64}], ids=str
)
def test_completions_match_those_without_slots(device: str, config: dict[str, Any]) -> None:
    """This includes requests that are preempted, and that get a slot after generating tokens."""
    actual, counts = generate(device, **config)
    without_slots, counts_without_slots = generate(device, **{**config, "resident_decode": False})
    assert actual == without_slots
    assert len({*map(tuple, actual)}) >= 7
    assert counts[EnginePath.PENALTIES] >= 19
    assert not counts_without_slots[EnginePath.PENALTIES]
    assert counts[EnginePath.RECOMPUTED] > 0 or "kv_cache_tokens" not in config


def test_requests_decode_without_slots_if_token_counts_do_not_fit(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected, _ = generate(device, batch_invariant=False)  # a GPU would warn about float32
    monkeypatch.setattr(resident_module, "SlotPenalties", raise_out_of_memory)
    actual, counts = generate(device, batch_invariant=False)
    assert actual == expected
    assert not counts[EnginePath.PENALTIES]
    assert [each.message.partition(":")[0] for each in caplog.records] == [
        "requests with penalties or guides decode without resident_decode, one step at a time"
    ]
