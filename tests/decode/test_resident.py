"""Resident sequences: the same tokens as decoded step by step by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import AttentionPath, EnginePath, SamplingParams
from roseinfer.decode.graphs import StepKind
from roseinfer.decode.step import step_sizes
from roseinfer.models.causal import CausalModel
from roseinfer.paths import Work
from roseinfer.sampling import SamplingBatch
from tests.decode.residents import GREEDY, PROMPTS, SIZE, Decoding, alone
from tests.kv.twins import assert_same_bits, bits

SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 16, 17, 64, 65, 100, 256])
def test_step_sizes_cover_every_batch_with_little_padding(largest: int) -> None:
    sizes = step_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for size in range(1, largest + 1):
        size_of_step = next(each for each in sizes if each >= size)
        assert size_of_step < 2 * size
        assert size_of_step - size < 32


@pytest.mark.sampled_cases
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sequences_get_the_tokens_they_get_alone(device: str, family: str, kernels: bool) -> None:
    """Sequences start one after another, and cross block boundaries at different steps."""
    decoding = Decoding(device, family=family, kernels=kernels)
    expected = []
    for prompt in PROMPTS:
        decoding.begin(prompt)
        decoding.step()
        decoding.step()
    for at, prompt in enumerate(PROMPTS):
        expected.append(alone(device, prompt, 1 + 2 * (len(PROMPTS) - at), family))
    assert decoding.texts() == expected
    counts = decoding.sessions.path_counts
    assert counts[EnginePath.RESIDENT] == 8
    attention_path = (
        AttentionPath.APPEND_AND_ATTEND if kernels else AttentionPath.RESIDENT_REFERENCE
    )
    assert counts[attention_path] == 16, "expected two layers per step"
    assert counts[EnginePath.FUSED_ARGMAX] == 8 * kernels


@pytest.mark.parametrize(
    "kernels", [pytest.param(True, marks=pytest.mark.slow), False], ids=["kernels", "reference"]
)
def test_released_slot_is_padding_and_then_reused(device: str, kernels: bool) -> None:
    decoding = Decoding(device, kernels=kernels)
    first, middle, _ = (decoding.begin(prompt) for prompt in PROMPTS[:3])
    decoding.step()
    decoding.end(middle)
    free = decoding.sessions.kv.num_free_blocks(0)
    decoding.step()
    assert decoding.sessions.kv.num_free_blocks(0) >= free - 1
    late = decoding.begin(PROMPTS[3])
    assert late.slot == middle.slot
    for _ in range(5):
        decoding.step()
    decoding.end(first)
    decoding.step()
    expected = [alone(device, PROMPTS[2], 9), alone(device, PROMPTS[3], 7)]
    assert decoding.texts() == expected


def test_host_uploads_nothing_between_new_blocks(device: str) -> None:
    decoding = Decoding(device)
    decoding.begin([1] * SIZE)
    decoding.begin([2] * SIZE)
    work = decoding.sessions.kv.work_counts
    before = work[Work.TABLE_ROWS]  # rows of the prompts, if a kernel attends to them
    uploaded = []
    for _ in range(2 * SIZE + 1):
        decoding.step()
        uploaded.append(work[Work.TABLE_ROWS] - before)
    assert uploaded == [2] * SIZE + [4] * SIZE + [6]


def test_blocks_are_reserved_whole_and_truncated(device: str) -> None:
    decoding = Decoding(device)
    kv = decoding.sessions.kv
    resident = decoding.begin([1, 2, 3])
    assert resident.sequence.token_capacity == SIZE
    (block,) = resident.sequence.block_lists[0]
    assert kv.block_info(block).length == SIZE
    decoding.step()
    decoding.step()
    assert len(resident.sequence.block_lists[0]) == 2
    resident.sequence.truncate(decoding.sessions.kv, 5)
    assert [kv.block_info(each).length for each in resident.sequence.block_lists[0]] == [4, 1]
    assert (resident.sequence.num_stored, resident.sequence.token_capacity) == (5, 5)


def test_sampled_and_greedy_sequences_share_a_step(device: str) -> None:
    """Sampling uses the same noise as on the host; afterwards steps are greedy again."""
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0])
    sampling = decoding.begin(PROMPTS[1], SAMPLED, seed=9)
    for _ in range(6):
        decoding.step()
    sampled_tokens = sampling.sequence.token_ids
    decoding.end(sampling)
    decoding.step()
    assert decoding.texts() == [alone(device, PROMPTS[0], 8)]

    engine = Decoding(device).sessions
    (session,), logits = engine.prefill([PROMPTS[1]])
    batch = SamplingBatch.of([SAMPLED], [9], device)
    session.token_ids += logits.argmax(-1).tolist()
    for _ in range(6):
        at = torch.tensor([len(session.token_ids)], device=device)
        session.token_ids += batch.sample_tokens(engine.extend([session]), at).tolist()
    assert sampled_tokens == session.token_ids


def test_steps_are_launched_before_previous_ones_are_read(device: str) -> None:
    decoding = Decoding(device)
    resident = decoding.begin(PROMPTS[0])
    in_flight = [decoding.decode.launch([resident], 0) for _ in range(6)]
    tokens = [each.wait()[resident.slot] for each in in_flight]
    assert resident.sequence.token_ids + tokens == alone(device, PROMPTS[0], 7)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_step_of_padding_changes_no_block(device: str, kernels: bool, greedy: bool) -> None:
    """Graphs are captured this way; sequences in flight continue unaffected."""
    decoding = Decoding(device, kernels=kernels)
    for prompt in PROMPTS[:2]:
        decoding.begin(prompt)
    decoding.step()
    kv, slots = decoding.sessions.kv, decoding.decode.slots
    before = [bits(cache[:, 1:]).clone() for cache in (kv.keys, kv.values)]
    with slots.rows.all_padding():
        decoding.decode.steps.step(4, StepKind(greedy))
    for cache, cache_before in zip((kv.keys, kv.values), before, strict=True):
        assert_same_bits(cache[:, 1:], cache_before, "blocks of live sequences")
    decoding.step()
    assert decoding.texts() == [alone(device, prompt, 3) for prompt in PROMPTS[:2]]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("token", [0, 1, 95])
def test_chosen_token_is_stored_by_the_next_step(
    device: str, token: int, kernels: bool, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 0 too, which rows without a request store."""
    decoding = Decoding(device, kernels=kernels)
    resident = decoding.begin(PROMPTS[0], GREEDY if greedy else SAMPLED)
    model_logits = CausalModel.logits

    def prefer_token(*arguments: Any) -> torch.Tensor:
        logits = model_logits(*arguments)
        logits[:, token] = logits.max() + 1000
        return logits

    monkeypatch.setattr(CausalModel, "logits", prefer_token)
    decoding.step()
    assert resident.sequence.token_ids[-1] == token
    assert decoding.decode.slots.rows.tokens[resident.slot] == token


@pytest.mark.parametrize("slots", [1, 2])
def test_only_a_step_of_one_row_is_for_long_contexts(
    device: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The megakernel of one row attends to so many tokens; longer contexts have another step."""
    decoding = Decoding(device, slots=slots)
    monkeypatch.setattr(decoding.decode, "_max_megakernel_length", 5)
    run, kinds = decoding.decode.steps.run, []

    def recorded_run(count: int, kind: StepKind) -> None:
        kinds.append(kind.long_context)
        run(count, kind)

    monkeypatch.setattr(decoding.decode.steps, "run", recorded_run)
    for _ in range(slots):
        decoding.begin([7, 3, 90])
    for _ in range(4):
        decoding.step()
    assert kinds == [False, False, slots == 1, slots == 1]


@pytest.mark.parametrize("early_blocks", [0, 1])
def test_one_of_a_few_sequences_gets_its_next_block_early(device: str, early_blocks: int) -> None:
    """A step that must give out a block gives out another one, while blocks are left for that."""
    decoding = Decoding(device)
    full, half_full = decoding.begin([1] * SIZE), decoding.begin([2] * (SIZE + 2))
    assert (full.sequence.token_capacity, half_full.sequence.token_capacity) == (SIZE, 2 * SIZE)
    decoding.decode.launch([full, half_full], early_blocks).wait()
    capacities = full.sequence.token_capacity, half_full.sequence.token_capacity
    assert capacities == (2 * SIZE, (2 + early_blocks) * SIZE)


def test_supported_parameters(device: str) -> None:
    supports = Decoding(device).decode.supports
    assert supports(SamplingParams(temperature=0.5, seed=3, stop=("a",)), 100)
    assert supports(SamplingParams(repetition_penalty=1.1), 100)
    assert supports(SamplingParams(logprobs=True), 100)
