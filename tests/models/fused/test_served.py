"""Engines that serve Llama's relatives on fused kernels, compared with float32 modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from tests.models.fused.test_llama import network

PROMPTS = [[7, 3, 90, 12, 5, 44, 2], [7, 3, 90, 12, 9], [1], list(range(20, 41)), [7, 3, 90, 12, 5]]
NEW = 9
FAR = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Maximum distance of a generated token's logit below the largest one."""


def build(kin: str, device: str) -> Any:
    return network(kin, device).to(torch.bfloat16 if device == "cuda" else torch.float32)


@torch.no_grad()
def shortfall(exact: Any, prompt: list[int], tokens_chosen: list[int]) -> float:
    """Return the largest distance of the tokens' logits below the largest logit."""
    tokens = torch.tensor([prompt + tokens_chosen], device=exact.device)
    logits = exact(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen_logits = logits.gather(1, torch.tensor(tokens_chosen, device=exact.device)[:, None])[
        :, 0
    ]
    return float((logits.max(1).values - chosen_logits).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kin",
    ["llama", "mistral window", "qwen3", "phi3, half of a head", "olmo2", "mixtral", "qwen3 moe"],
)
def test_tokens_are_the_argmax(device: str, kin: str) -> None:
    """In one batch with shared prefixes, in chunks, and in slots with run-ahead."""
    if device == "cuda" and kin in ("mixtral", "qwen3 moe"):
        pytest.skip(
            "in 16 bits, rounding decides near ties between experts, and later tokens differ"
        )
    model = build(kin, device)
    exact = build(kin, device).float()
    llm = LLM(
        model,
        device=device,
        fused_model=True,
        resident_decode=True,
        run_ahead=2,
        attention_backend="triton",
        block_size=4,
        kv_cache_tokens=160,
        max_batch_size=4,
        prefill_max_tokens=16,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.token_ids) == NEW
        assert shortfall(exact, prompt, output.token_ids) < FAR[model.dtype]
    counts = llm.engine.path_counts
    assert counts[EnginePath.FUSED]
    assert counts[EnginePath.FUSED_ARGMAX]
    assert counts[EnginePath.CHUNKED]
    assert counts[EnginePath.PREFIX_HIT]
