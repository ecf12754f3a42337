"""How tokens are chosen: logprobs, penalties and seeds, as a user sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from tests.engine.continuations import TEXTS, by_transformers, greedy, one, original, small_llm


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_models_logits(device: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, seed=3, logprobs=True)
    asked, unasked = small_llm(device).generate(
        [TEXTS[0], TEXTS[1]], [params, greedy()], progress=False
    )
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + asked.token_ids], device=device)
        logits = original(device).model(row).logits[0, len(prompt) - 1 : -1]
    want = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
    assert asked.logprobs is not None
    torch.testing.assert_close(
        torch.tensor(asked.logprobs, device=device), want, atol=1e-3, rtol=1e-3
    )
    assert len(asked.logprobs) == len(asked.token_ids)
    assert unasked.logprobs is None


def test_logprobs_survive_preemption(device: str) -> None:
    params = greedy(20, ignore_eos=True, logprobs=True)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    scarce, plenty = small_llm(device, kv_cache_tokens=48), small_llm(device)
    got = scarce.generate(prompts, params, progress=False)
    want = plenty.generate(prompts, params, progress=False)
    assert scarce.engine.path_counts[EnginePath.RESUMED] > 0
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_a_repetition_penalty_is_transformers(device: str) -> None:
    """The prompt's tokens count too. Neighbours without one are left alone."""
    llm = small_llm(device)
    penalties = [1.5, 1.0, 3.0]
    prompts = ["abcabcabc"] * 3
    outputs = llm.generate(
        prompts,
        [greedy(repetition_penalty=penalty, ignore_eos=True) for penalty in penalties],
        progress=False,
    )
    for penalty, output in zip(penalties, outputs, strict=True):
        want = by_transformers(device, prompts[0], 16, repetition_penalty=penalty)
        assert output.token_ids == want
    assert outputs[0].token_ids != outputs[1].token_ids


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=1.2, top_k=50, top_p=0.98, seed=seed, max_new_tokens=20, ignore_eos=True
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_cache_tokens": 48},
        {"kv_cache_tokens": 48, "prefix_cache": False},
        {"max_batch_size": 1},
        {"prefill_max_tokens": 3},
        {"prefill_admission_policy": "pack", "prefill_max_tokens": 20},
    ],
    ids=str,
)
def test_a_seed_draws_the_same_whatever_it_is_batched_with(
    device: str, config: dict[str, Any]
) -> None:
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    alone = [
        one(small_llm(device), prompt, sampled(seed)).token_ids
        for seed, prompt in enumerate(prompts)
    ]
    llm = small_llm(device, **config)
    params = [sampled(seed) for seed in range(len(prompts))]
    together = llm.generate(prompts, params, progress=False)
    assert [output.token_ids for output in together] == alone
    backwards = llm.generate(prompts[::-1], params[::-1], progress=False)
    assert [output.token_ids for output in backwards] == alone[::-1]


def test_seeds_differ_and_so_do_requests_without_one(device: str) -> None:
    llm = small_llm(device)
    hot = [
        SamplingParams(temperature=5.0, seed=seed, ignore_eos=True) for seed in (1, 2, None, None)
    ]
    outputs = llm.generate(["Once"] * 4, hot, progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_every_token_is_drawn_anew(device: str) -> None:
    """At this temperature all tokens are about as likely, whatever stands before them."""
    hot = SamplingParams(temperature=1000.0, seed=5, max_new_tokens=30, ignore_eos=True)
    assert len(set(one(small_llm(device), "Once", hot).token_ids)) > 20
