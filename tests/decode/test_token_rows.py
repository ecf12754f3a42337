"""Decode steps of several tokens: after a draft comes the token that follows without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AttentionPath, EnginePath, SamplingParams
from roseinfer.attention.backend import ResidentBatch
from roseinfer.decode.step import MultiTokenDecode, TokenSpan
from roseinfer.sampling import unpack_logprobs
from tests.decode.residents import PROMPTS, Decoding, alone, build_runner

if TYPE_CHECKING:
    from roseinfer.engine.runner import SequenceRunner
    from roseinfer.kv.manager import StepBatch
    from roseinfer.kv.sequence import CachedSequence

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
SAMPLED = SamplingParams(temperature=0.9, top_k=12, seed=3)


def token_rows(sessions: SequenceRunner, *, graphs: bool = False) -> MultiTokenDecode:
    return MultiTokenDecode(
        sessions.model,
        sessions.attention,
        20,
        EnginePath.DRAFT_VERIFICATION,
        captured_rows=int(graphs),
    )


def prefill(sessions: SequenceRunner, prompts: list[list[int]]) -> list[CachedSequence]:
    return sessions.prefill(prompts)[0]


def completion_of(device: str, prompt: list[int], count: int, family: str = "gpt2") -> list[int]:
    return alone(device, prompt, count, family)[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=_NEEDS_GPU)])
def test_correct_drafts_yield_the_completion(
    device: str, family: str, kernels: bool, graphs: bool
) -> None:
    """Drafts cross block boundaries, in sequences of several lengths at once."""
    sessions = build_runner(device, family, kernels=kernels)
    rows = token_rows(sessions, graphs=graphs)
    texts = [completion_of(device, prompt, 16, family) for prompt in PROMPTS]
    sequences = prefill(sessions, PROMPTS)
    num_done = [0] * len(sequences)
    for sizes in ((5, 1, 7, 2), (1, 1, 1, 1), (6, 8, 2, 4)):
        entries = [
            TokenSpan(session, text[at : at + size])
            for session, text, at, size in zip(sequences, texts, num_done, sizes, strict=True)
        ]
        readback, logprobs = rows.launch(entries)
        assert logprobs is None
        num_done = [at + size for at, size in zip(num_done, sizes, strict=True)]
        expected = [
            token
            for text, at, size in zip(texts, num_done, sizes, strict=True)
            for token in text[at - size + 1 : at + 1]
        ]
        assert readback.wait() == expected
    for session, at, prompt in zip(sequences, num_done, PROMPTS, strict=True):
        assert session.num_stored == len(prompt) + at
    counts = sessions.path_counts
    attention_path = AttentionPath.DECODE_TRITON if kernels else AttentionPath.RESIDENT_REFERENCE
    assert counts[attention_path] >= 3 * 2
    assert counts[EnginePath.DRAFT_VERIFICATION] == 3
    assert counts[EnginePath.CUDA_GRAPH] == 3 * graphs


def test_attention_knows_that_rows_may_belong_to_one_sequence(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that stores and attends row by row would miss the tokens of the rows before."""
    sessions = build_runner(device)
    rows = token_rows(sessions)
    (session,) = prefill(sessions, PROMPTS[:1])
    prepare, has_drafts = sessions.attention.prepare, []

    def recorded_prepare(batch: StepBatch | ResidentBatch) -> None:
        has_drafts.append(isinstance(batch, ResidentBatch) and batch.has_drafts)
        prepare(batch)

    monkeypatch.setattr(sessions.attention, "prepare", recorded_prepare)
    rows.launch([TokenSpan(session, [5, 6, 7])])
    assert has_drafts == [True]


def test_rejected_draft_is_rolled_back(device: str) -> None:
    sessions = build_runner(device)
    rows = token_rows(sessions)
    text = completion_of(device, PROMPTS[0], 8)
    (session,) = prefill(sessions, PROMPTS[:1])
    wrong_draft = [(token + 1) % 90 for token in text[2:6]]
    readback, _ = rows.launch([TokenSpan(session, [*text[:2], *wrong_draft])])
    assert readback.wait()[:2] == text[1:3]
    session.roll_back(sessions.kv, len(PROMPTS[0]) + 2)
    readback, _ = rows.launch([TokenSpan(session, text[2:5])])
    assert readback.wait() == text[3:6]


def test_tokens_are_sampled_as_in_a_slot(device: str) -> None:
    """Tokens depend on seed and position; other rows are greedy, and some have logprobs."""
    decoding = Decoding(device)
    decoding.begin(PROMPTS[2], SAMPLED, seed=9)
    for _ in range(6):
        decoding.step()
    text = decoding.texts()[0][len(PROMPTS[2]) :]
    sessions = build_runner(device)
    rows = token_rows(sessions)
    one, other = prefill(sessions, [PROMPTS[2], PROMPTS[0]])
    greedy = completion_of(device, PROMPTS[0], 4)
    greedy_with_logprobs = SamplingParams(temperature=0, logprobs=True, top_logprobs=1)
    readback, logprobs = rows.launch(
        [
            TokenSpan(one, text[:6], SAMPLED, 9),
            TokenSpan(other, greedy[:3], greedy_with_logprobs),
        ]
    )
    assert readback.wait() == [*text[1:7], *greedy[1:4]]
    assert logprobs is not None
    numbers = logprobs.wait()
    each = len(numbers) // 9
    for row, token in enumerate(greedy[1:4], start=6):
        unpacked = unpack_logprobs(numbers[row * each : (row + 1) * each])
        assert unpacked.top_logprobs[0] == (token, unpacked.logprob), "expected the argmax"
