"""bfloat16: as accurate as transformers in bfloat16.

The reference is the logits of the same weights in float32. A tolerance of twice transformers' own
error leaves room for another order of summation, and for nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from tests.models.families import CONFIGS, POSITIONS, VOCABULARY, tiny

MAX_RELATIVE_ERROR = 2.0
MIN_GAP = 4.0
"""Multiple of that error by which the top two logits must differ, so that their order is fixed."""

most_families = pytest.mark.parametrize(
    "family",
    [name for name in CONFIGS if name != "gpt-oss"],  # rounding changes its routing
)


@lru_cache(maxsize=len(CONFIGS))
def rounded(family: str, device: str) -> Any:
    return tiny(family, device).to(torch.bfloat16)


@lru_cache(maxsize=len(CONFIGS))
def exact(family: str, device: str) -> Any:
    """Return the model in float32, with weights rounded to bfloat16."""
    return tiny(family, device).to(torch.bfloat16).float()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, POSITIONS // 3, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def last_logits(model: Any, tokens: list[int], device: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens], device=device)).logits[0, -1]
    return logits.float()


def llm(family: str, device: str, **config: Any) -> LLM:
    model = tiny(family, device).to(torch.bfloat16)
    return LLM(model, device=device, dtype="bfloat16", kv_cache_tokens=2048, block_size=8, **config)


@pytest.mark.sampled_cases
@most_families
def test_logits_are_as_accurate_as_transformers(device: str, family: str) -> None:
    sessions = llm(family, device).engine.sequence_runner
    error = transformers_error = 0.0
    running, logits = sessions.prefill(prompts(12))
    for _ in range(8):
        for session, row in zip(running, logits, strict=True):
            expected = last_logits(exact(family, device), session.token_ids, device)
            other = last_logits(rounded(family, device), session.token_ids, device)
            error += float((row.float() - expected).square().sum())
            transformers_error += float((other - expected).square().sum())
            session.token_ids.append(int(expected.argmax()))
        logits = sessions.extend(running)
    assert transformers_error > 0
    assert error**0.5 <= MAX_RELATIVE_ERROR * transformers_error**0.5


@pytest.mark.sampled_cases
@most_families
@pytest.mark.parametrize("config", [{}, {"resident_decode": True, "run_ahead": 2}], ids=str)
def test_tokens_agree_up_to_near_ties(device: str, family: str, config: dict[str, Any]) -> None:
    """All tokens of 40 concurrent requests agree, up to the first that rounding may change."""
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    compared = 0
    requests = prompts(40)
    for prompt, output in zip(
        requests, llm(family, device, **config).generate(requests, params), strict=True
    ):
        tokens = list(prompt)
        for token in output.token_ids:
            expected = last_logits(exact(family, device), tokens, device)
            other = last_logits(rounded(family, device), tokens, device)
            first, second = expected.topk(2).values.tolist()
            if first - second <= MIN_GAP * float((other - expected).abs().max()):
                break
            assert token == int(expected.argmax())
            tokens.append(token)
            compared += 1
    assert compared > 40, "rounding changes too many tokens for a comparison"
