"""Tokens and log-probabilities of both models, compared with transformers in float32."""

from __future__ import annotations

from math import exp
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from tests.real_models.real_model import RealModel
from tests.real_models.texts import PAGE, prompts

if TYPE_CHECKING:
    from collections.abc import Callable


_GREEDY = SamplingParams(temperature=0, max_new_tokens=16, logprobs=True)


def test_few_texts_are_those_of_generate(real_model: RealModel) -> None:
    questions = prompts()[4:204:50]
    outputs = real_model.llm(kv_cache_tokens=2048).generate(questions, _GREEDY)
    for question, output in zip(questions, outputs, strict=True):
        ids = torch.tensor([real_model.encode(question)])
        expected = real_model.network.generate(ids, max_new_tokens=16, do_sample=False)
        text = real_model.tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert output.text == text


@pytest.mark.slow
def test_200_prompts(real_model: RealModel, figure: Callable[[str], None]) -> None:
    questions = prompts()
    assert len(questions) == 200
    outputs = real_model.llm().generate(questions, _GREEDY)
    figure(f"{real_model.name}, 200 prompts: {real_model.compare(outputs)}")


@pytest.mark.slow
def test_perplexity_of_a_page(real_model: RealModel, figure: Callable[[str], None]) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=True)
    (output,) = real_model.llm(kv_cache_tokens=2048).generate(PAGE, params)
    token_ids = real_model.encode(PAGE)
    logprobs = real_model.logprobs(token_ids, len(token_ids) - 1)
    expected = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    rest = [each for each in output.prompt_logprobs if each is not None]
    perplexity, reference = (exp(-fmean(each)) for each in (rest, expected))
    largest = max(abs(a - b) for a, b in zip(rest, expected, strict=True))
    figure(
        f"{real_model.name}, a page of {len(token_ids)} tokens: perplexity {perplexity:.6f}, "
        f"transformers {reference:.6f}; log-probabilities at most {largest:.1e} apart"
    )
    assert abs(perplexity - reference) <= 1e-4 * reference
    assert largest <= 1e-3


@pytest.mark.slow
def test_tiny_cache_preempts(real_model: RealModel, figure: Callable[[str], None]) -> None:
    """Requests give up their blocks to others and come back; their completions stay the same."""
    questions = [each for each in prompts()[4::5] if len(each) < 200][:12]
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True, logprobs=True)
    llm = real_model.llm(kv_cache_tokens=128, block_size=8, max_batch_size=6, prefill_max_tokens=16)
    outputs = llm.generate(questions, params)
    counts = llm.engine.path_counts
    assert counts[EnginePath.RECOMPUTED] > 0
    assert counts[EnginePath.CHUNKED] > 0
    figure(
        f"{real_model.name}, 12 requests in 128 tokens of cache, {counts[EnginePath.RECOMPUTED]} "
        f"times preempted: {real_model.compare(outputs)}"
    )


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_bfloat16_runs_on_joined_weights(smollm2: RealModel) -> None:
    """Rounding, which this model amplifies, is not taken for an error of the kernels."""
    llm = RealModel.load(smollm2.file, torch.bfloat16).llm(kv_cache_tokens=256)
    llm.generate("The capital of France is", SamplingParams(max_new_tokens=4))
    assert llm.engine.path_counts[EnginePath.JOINED] > 0
