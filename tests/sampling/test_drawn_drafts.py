"""Sampling with speculative decoding: the model's distribution, by statistics."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.engine.in_flight import TokensInFlight
from roseinfer.sampling import SamplingBatch
from tests.engine.repeating_models import draft_counts, repeating_llm
from tests.engine.test_run_ahead import greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.engine.request import Request

FIRST_TOKENS = [65]
COMPLETIONS = 3000
MAX_NEW_TOKENS = 4
MIN_EXPECTED = 20
"""Minimum expected count of a cell; the rule of thumb for this statistic is 5."""
SIGMAS = 4.5


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, top_k=3, seed=seed, ignore_eos=True
    )


def sample_completions(llm: LLM) -> tuple[list[int], list[list[int]]]:
    """Return a prompt with a periodic completion, and its completions for many seeds."""
    (prompt,) = llm.generate([FIRST_TOKENS], greedy(40, ignore_eos=True), progress=False)
    params_by_seed = [params(seed) for seed in range(COMPLETIONS)]
    outputs = llm.generate([prompt.token_ids] * COMPLETIONS, params_by_seed, progress=False)
    return prompt.token_ids, [output.token_ids for output in outputs]


def distribution(llm: LLM, tokens: Sequence[int]) -> list[float]:
    """Return the distribution of the next token, by a forward pass without speculation."""
    runner = llm.engine.sequence_runner
    (session,), logits = runner.prefill([tokens])
    runner.release(session)
    batch = SamplingBatch.of([params(0)], [0], logits.device)
    probabilities: list[float] = batch.probabilities(logits)[0].tolist()
    return probabilities


def deviation(llm: LLM, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> float:
    """Return how many standard deviations the completions' chi-squared is above its mean."""
    counts_by_prefix: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for at, token in enumerate(text):
            counts_by_prefix[tuple(text[:at])][token] += 1
    statistic, freedom = 0.0, 0
    for prefix, counts in counts_by_prefix.items():
        expected = [p * counts.total() for p in distribution(llm, [*prompt, *prefix])]
        if min(filter(None, expected)) < MIN_EXPECTED:
            continue
        assert all(expected[token] for token in counts), "a token of probability 0 was sampled"
        cells = [(counts[token], mean) for token, mean in enumerate(expected) if mean]
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += len(cells) - 1
    assert freedom > 20
    spread: float = (2 * freedom) ** 0.5
    return (statistic - freedom) / spread


@pytest.fixture
def llm(device: str) -> LLM:
    return repeating_llm(device, speculation="ngram", resident_decode=False)


@pytest.mark.slow
def test_sampled_tokens_have_the_models_distribution(llm: LLM) -> None:
    assert deviation(llm, *sample_completions(llm)) < SIGMAS
    _, accepted, rejected = draft_counts(llm)
    assert min(accepted, rejected) > COMPLETIONS // 10


@pytest.mark.slow
def test_statistic_detects_drafts_accepted_too_often(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = TokensInFlight._verify

    def accept_too_often(
        flight: TokensInFlight, request: Request, first: int, tokens: list[int]
    ) -> int:
        if request.id % 3 == 0:
            tokens[first] = request.drafts[0]
        return verify(flight, request, first, tokens)

    monkeypatch.setattr(TokensInFlight, "_verify", accept_too_often)
    assert deviation(llm, *sample_completions(llm)) > SIGMAS
