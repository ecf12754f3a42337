"""Resident sequences get the same tokens as those decoded step by step by the host."""

from __future__ import annotations

import pytest
import torch

from roseinfer import AttentionPath, EnginePath, SamplingBatch, SamplingParams
from roseinfer.decode.graphs import StepKind
from roseinfer.decode.step import step_sizes
from roseinfer.paths import Work
from tests.decode.residents import PROMPTS, SIZE, Decoding, alone
from tests.kv.twins import assert_same_bits, bits

DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 16, 17, 64, 65, 100, 256])
def test_the_ladder_has_a_step_for_every_size_and_little_padding(most: int) -> None:
    sizes = step_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for size in range(1, most + 1):
        taken = next(each for each in sizes if each >= size)
        assert taken < 2 * size
        assert taken - size < 32


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_gets_what_it_gets_alone(device: str, family: str, kernels: bool) -> None:
    """Sequences start one after another, and cross block boundaries at different steps."""
    decoding = Decoding(device, family=family, kernels=kernels)
    want = []
    for prompt in PROMPTS:
        decoding.begin(prompt)
        decoding.step()
        decoding.step()
    for at, prompt in enumerate(PROMPTS):
        want.append(alone(device, prompt, 1 + 2 * (len(PROMPTS) - at), family))
    assert decoding.texts() == want
    counts = decoding.sessions.path_counts
    assert counts[EnginePath.RESIDENT] == 8
    attended = AttentionPath.APPEND_AND_ATTEND if kernels else AttentionPath.RESIDENT_REFERENCE
    assert counts[attended] == 16, "of two layers each"
    assert counts[EnginePath.FUSED_ARGMAX] == 8 * kernels


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_slot_in_the_middle_is_padding_and_then_anothers(device: str, kernels: bool) -> None:
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
    want = [alone(device, PROMPTS[2], 9), alone(device, PROMPTS[3], 7)]
    assert decoding.texts() == want


def test_the_host_uploads_nothing_while_blocks_last(device: str) -> None:
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


def test_a_block_is_taken_as_a_whole_and_given_back(device: str) -> None:
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


def test_who_draws_draws_beside_who_does_not(device: str) -> None:
    """Sampling uses the same noise as on the host; afterwards steps are greedy again."""
    decoding = Decoding(device)
    decoding.begin(PROMPTS[0])
    drawing = decoding.begin(PROMPTS[1], DRAWN, seed=9)
    for _ in range(6):
        decoding.step()
    drawn = drawing.sequence.token_ids
    decoding.end(drawing)
    decoding.step()
    assert decoding.texts() == [alone(device, PROMPTS[0], 8)]

    engine = Decoding(device).sessions
    (session,), logits = engine.prefill([PROMPTS[1]])
    batch = SamplingBatch.of([DRAWN], [9], device)
    session.token_ids += logits.argmax(-1).tolist()
    for _ in range(6):
        at = torch.tensor([len(session.token_ids)], device=device)
        session.token_ids += batch.sample_tokens(engine.extend([session]), at).tolist()
    assert drawn == session.token_ids


def test_steps_that_are_launched_before_others_are_read(device: str) -> None:
    decoding = Decoding(device)
    resident = decoding.begin(PROMPTS[0])
    on_their_way = [decoding.decode.launch([resident], 0) for _ in range(6)]
    tokens = [each.wait()[resident.slot] for each in on_their_way]
    assert resident.sequence.token_ids + tokens == alone(device, PROMPTS[0], 7)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_step_on_emptied_slots_touches_no_block_of_theirs(
    device: str, kernels: bool, greedy: bool
) -> None:
    """Graphs are captured this way; sequences in flight continue unaffected."""
    decoding = Decoding(device, kernels=kernels)
    for prompt in PROMPTS[:2]:
        decoding.begin(prompt)
    decoding.step()
    kv, slots = decoding.sessions.kv, decoding.decode.slots
    before = [bits(cache[:, 1:]).clone() for cache in (kv.keys, kv.values)]
    with slots.rows.all_padding():
        decoding.decode.steps.step(4, StepKind(greedy))
    for cache, was in zip((kv.keys, kv.values), before, strict=True):
        assert_same_bits(cache[:, 1:], was, "blocks of live sequences")
    decoding.step()
    assert decoding.texts() == [alone(device, prompt, 3) for prompt in PROMPTS[:2]]


def test_who_may_decode_there(device: str) -> None:
    takes = Decoding(device).decode.supports
    assert takes(SamplingParams(temperature=0.5, seed=3, stop=("a",)), 100)
    assert takes(SamplingParams(repetition_penalty=1.1), 100)
    assert takes(SamplingParams(logprobs=True), 100)
