"""The token after a draft is the one that the sequence gets without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AttentionPath, EnginePath, SamplingParams
from roseinfer.decode.step import MultiTokenDecode, TokenSpan
from roseinfer.sampling.logprobs import unpack_logprobs
from tests.decode.residents import GREEDY, PROMPTS, Decoding, alone, engine_on

if TYPE_CHECKING:
    from roseinfer.engine.runner import SequenceRunner
    from roseinfer.kv.sequence import CachedSequence

_ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
DRAWN = SamplingParams(temperature=0.9, top_k=12, seed=3)


def token_rows(sessions: SequenceRunner, *, graphs: bool = False) -> MultiTokenDecode:
    return MultiTokenDecode(
        sessions.model,
        sessions.attention,
        20,
        EnginePath.DRAFT_VERIFICATION,
        captured_rows=int(graphs),
    )


def begun(sessions: SequenceRunner, prompts: list[list[int]]) -> list[CachedSequence]:
    return sessions.prefill(prompts)[0]


def behind(device: str, prompt: list[int], count: int, family: str = "gpt2") -> list[int]:
    return alone(device, prompt, count, family)[len(prompt) :]


@pytest.mark.many_alike
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=_ON_A_GPU)])
def test_drafts_that_are_right_bring_the_text_itself(
    device: str, family: str, kernels: bool, graphs: bool
) -> None:
    """Across block boundaries, in sequences of several lengths at once, step after step."""
    sessions = engine_on(device, family, kernels=kernels)
    rows = token_rows(sessions, graphs=graphs)
    texts = [behind(device, prompt, 16, family) for prompt in PROMPTS]
    own = begun(sessions, PROMPTS)
    done = [0] * len(own)
    for sizes in ((5, 1, 7, 2), (1, 1, 1, 1), (6, 8, 2, 4)):
        entries = [
            TokenSpan(session, GREEDY, 0, text[at : at + size])
            for session, text, at, size in zip(own, texts, done, sizes, strict=True)
        ]
        arrival, told = rows.launch(entries)
        assert told is None
        done = [at + size for at, size in zip(done, sizes, strict=True)]
        want = [
            token
            for text, at, size in zip(texts, done, sizes, strict=True)
            for token in text[at - size + 1 : at + 1]
        ]
        assert arrival.wait() == want
    for session, at, prompt in zip(own, done, PROMPTS, strict=True):
        assert session.num_stored == len(prompt) + at
    counts = sessions.path_counts
    attended = AttentionPath.DECODE_TRITON if kernels else AttentionPath.RESIDENT_REFERENCE
    assert counts[attended] >= 3 * 2
    assert counts[EnginePath.DRAFT_VERIFICATION] == 3
    assert counts[EnginePath.CUDA_GRAPH] == 3 * graphs


def test_what_a_wrong_draft_stored_is_rolled_back(device: str) -> None:
    sessions = engine_on(device)
    rows = token_rows(sessions)
    text = behind(device, PROMPTS[0], 8)
    (session,) = begun(sessions, PROMPTS[:1])
    wrong = [(token + 1) % 90 for token in text[2:6]]
    arrival, _ = rows.launch([TokenSpan(session, GREEDY, 0, [*text[:2], *wrong])])
    assert arrival.wait()[:2] == text[1:3]
    session.roll_back(sessions.kv, len(PROMPTS[0]) + 2)
    arrival, _ = rows.launch([TokenSpan(session, GREEDY, 0, text[2:5])])
    assert arrival.wait() == text[3:6]


def test_tokens_are_drawn_as_in_a_slot(device: str) -> None:
    """By seed and position; other rows of the step are greedy, and some want logprobs."""
    decoding = Decoding(device)
    decoding.begin(PROMPTS[2], DRAWN, seed=9)
    for _ in range(6):
        decoding.step()
    text = decoding.texts()[0][len(PROMPTS[2]) :]
    sessions = engine_on(device)
    rows = token_rows(sessions)
    one, other = begun(sessions, [PROMPTS[2], PROMPTS[0]])
    greedy = behind(device, PROMPTS[0], 4)
    told_greedy = SamplingParams(temperature=0, logprobs=True, top_logprobs=1)
    arrival, told = rows.launch(
        [TokenSpan(one, DRAWN, 9, text[:6]), TokenSpan(other, told_greedy, 0, greedy[:3])]
    )
    assert arrival.wait() == [*text[1:7], *greedy[1:4]]
    assert told is not None
    numbers = told.wait()
    each = len(numbers) // 9
    for row, token in enumerate(greedy[1:4], start=6):
        own = unpack_logprobs(numbers[row * each : (row + 1) * each])
        assert own.top_logprobs[0] == (token, own.logprob), "it is the likeliest"
