"""Texts that are drawn with speculation have the model's distribution, by statistics."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, SamplingBatch, SamplingParams
from roseinfer.engine.in_flight import TokensInFlight
from tests.engine.repeating_models import drafted, repeating_llm
from tests.engine.test_run_ahead import greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.request import Request

BEGUN = [65]
TEXTS = 3000
MOST_NEW = 4
LEAST_EXPECTED = 20
"""The rule of thumb for this statistic is 5."""
SIGMAS = 4.5


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=MOST_NEW, temperature=1.0, top_k=3, seed=seed, ignore_eos=True
    )


def drawn(llm: LLM) -> tuple[list[int], list[list[int]]]:
    """Return a prompt that goes round in circles, and what follows it for many seeds."""
    (prompt,) = llm.generate([BEGUN], greedy(40, ignore_eos=True), progress=False)
    every = [params(seed) for seed in range(TEXTS)]
    outputs = llm.generate([prompt.token_ids] * TEXTS, every, progress=False)
    return prompt.token_ids, [output.token_ids for output in outputs]


def distribution(llm: LLM, tokens: Sequence[int]) -> list[float]:
    """Return what the next token is drawn from, by a forward pass without speculation."""
    runner = llm.engine.sequence_runner
    (session,), logits = runner.prefill([tokens])
    runner.release(session)
    batch = SamplingBatch.of([params(0)], [0], logits.device)
    probabilities: list[float] = batch.probabilities(logits)[0].tolist()
    return probabilities


def deviation(llm: LLM, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> float:
    """Return how many standard deviations the texts' chi-squared is above its mean."""
    seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for at, token in enumerate(text):
            seen[tuple(text[:at])][token] += 1
    statistic, freedom = 0.0, 0
    for begun, counts in seen.items():
        expected = [p * counts.total() for p in distribution(llm, [*prompt, *begun])]
        if min(filter(None, expected)) < LEAST_EXPECTED:
            continue
        assert all(expected[token] for token in counts), "a token that cannot be drawn"
        cells = [(counts[token], mean) for token, mean in enumerate(expected) if mean]
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += len(cells) - 1
    assert freedom > 20
    spread: float = (2 * freedom) ** 0.5
    return (statistic - freedom) / spread


@pytest.fixture
def llm(device: str) -> LLM:
    return repeating_llm(device, speculation="ngram", resident_decode=False)


def test_drawn_tokens_have_the_models_distribution(llm: LLM) -> None:
    assert deviation(llm, *drawn(llm)) < SIGMAS
    _, accepted, refused = drafted(llm)
    assert min(accepted, refused) > TEXTS // 10


def test_drafts_that_are_believed_too_often_show(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = TokensInFlight._verify

    def believe(flight: TokensInFlight, request: Request, first: int, tokens: list[int]) -> int:
        if request.id % 3 == 0:
            tokens[first] = flight.drafts[request.id][0]
        return verify(flight, request, first, tokens)

    monkeypatch.setattr(TokensInFlight, "_verify", believe)
    assert deviation(llm, *drawn(llm)) > SIGMAS
