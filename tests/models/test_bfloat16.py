"""bfloat16 against transformers: as near to the truth as transformers itself, in its own bfloat16.

The truth are the logits of the same weights in float32. A tolerance of twice transformers' own
distance from it leaves room for another order of adding up, and for nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from tests.models.families import CONFIGS, POSITIONS, VOCABULARY, tiny

TIMES_TRANSFORMERS = 2.0
CLEAR = 4.0
"""So many times that distance apart, the two likeliest tokens cannot change places."""

every_family = pytest.mark.parametrize(
    "family",
    [name for name in CONFIGS if name != "gpt-oss"],  # whose router turns on rounding
)


@lru_cache(maxsize=len(CONFIGS))
def rounded(family: str, device: str) -> Any:
    return tiny(family, device).to(torch.bfloat16)


@lru_cache(maxsize=len(CONFIGS))
def truth(family: str, device: str) -> Any:
    """Return the model in float32, with the weights that bfloat16 has."""
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


@every_family
def test_logits_are_as_near_to_the_truth(device: str, family: str) -> None:
    sessions = llm(family, device).engine.sequence_runner
    mine = theirs = 0.0
    running, logits = sessions.prefill(prompts(12))
    for _ in range(8):
        for session, row in zip(running, logits, strict=True):
            wanted = last_logits(truth(family, device), session.token_ids, device)
            other = last_logits(rounded(family, device), session.token_ids, device)
            mine += float((row.float() - wanted).square().sum())
            theirs += float((other - wanted).square().sum())
            session.token_ids.append(int(wanted.argmax()))
        logits = sessions.extend(running)
    assert theirs > 0
    assert mine**0.5 <= TIMES_TRANSFORMERS * theirs**0.5


@pytest.mark.many_alike
@every_family
@pytest.mark.parametrize("config", [{}, {"resident_decode": True, "run_ahead": 2}], ids=str)
def test_tokens_are_the_same_wherever_rounding_cannot_decide(
    device: str, family: str, config: dict[str, Any]
) -> None:
    """Every token of 40 requests at once agrees, up to the first that rounding may have decided."""
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    compared = 0
    asked = prompts(40)
    for prompt, output in zip(
        asked, llm(family, device, **config).generate(asked, params), strict=True
    ):
        tokens = list(prompt)
        for token in output.token_ids:
            wanted = last_logits(truth(family, device), tokens, device)
            other = last_logits(rounded(family, device), tokens, device)
            first, second = wanted.topk(2).values.tolist()
            if first - second <= CLEAR * float((other - wanted).abs().max()):
                break
            assert token == int(wanted.argmax())
            tokens.append(token)
            compared += 1
    assert compared > 40, "rounding decides too often for this to say anything"
