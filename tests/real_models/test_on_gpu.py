"""Both models on a GPU, in bfloat16: log-probabilities, batch invariance, and a long tail."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from tests.real_models.real_model import RealModel
from tests.real_models.texts import long_tail, percentiles, prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer import RequestOutput

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

_REQUESTS = 1000
_GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True, logprobs=True)


def _llm(model: RealModel, **config: Any) -> LLM:
    return LLM(str(model.file), device="cuda", dtype="bfloat16", **config)


def _errors(
    outputs: Sequence[RequestOutput], exact: RealModel, rounded: RealModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far each token's log-probability is from that in float32, ours and theirs.

    Theirs is that of transformers in bfloat16, for the same tokens.
    """
    ours, theirs = [], []
    for output in outputs:
        assert output.error is None
        assert output.logprobs is not None
        ids = [*_prompt_ids(exact, output), *output.token_ids]
        chosen = torch.tensor(output.token_ids)[:, None]
        reference, other = (
            each.logprobs(ids, len(chosen)).gather(1, chosen)[:, 0] for each in (exact, rounded)
        )
        ours.append(torch.tensor(output.logprobs) - reference)
        theirs.append(other - reference)
    return torch.cat(ours).abs(), torch.cat(theirs).abs()


def _prompt_ids(model: RealModel, output: RequestOutput) -> list[int]:
    prompt = output.prompt
    return model.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _mean_and_most(errors: torch.Tensor) -> str:
    return f"{errors.mean():.4f} and {errors.max():.3f}"


def test_rounding_is_no_worse_than_that_of_transformers(
    real_model: RealModel, figure: Callable[[str], None]
) -> None:
    exact = RealModel.load(real_model.file, device="cuda")
    rounded = RealModel.load(real_model.file, torch.bfloat16, "cuda")
    llm = _llm(real_model)
    outputs = llm.generate(prompts(), _GREEDY)
    ours, theirs = _errors(outputs, exact, rounded)
    fused = llm.engine.path_counts[EnginePath.FUSED] > 0
    assert fused == ("SmolLM2" in real_model.name)
    figure(
        f"{real_model.name} in bfloat16, {len(ours)} tokens, {fused=}: log-probabilities "
        f"are {_mean_and_most(ours)} from those in float32, mean and most; those of transformers "
        f"{_mean_and_most(theirs)}"
    )
    assert ours.mean() <= 1.2 * theirs.mean()


def test_same_bits_alone_and_in_company(
    real_model: RealModel, figure: Callable[[str], None]
) -> None:
    llm = _llm(real_model, prefix_cache=False)
    together = llm.generate(prompts(), _GREEDY)
    chosen = range(0, len(together), 5)
    alone = [llm.generate(prompts()[at], _GREEDY)[0] for at in chosen]
    differ = sum(
        (one.token_ids, one.logprobs) != (together[at].token_ids, together[at].logprobs)
        for at, one in zip(chosen, alone, strict=True)
    )
    figure(
        f"{real_model.name}: batch invariant: {llm.batch_variance_reason or 'yes'}; "
        f"{differ} of {len(alone)} requests have other bits alone"
    )
    assert not (llm.batch_invariant and differ)


def test_1000_requests_with_a_long_tail(
    real_model: RealModel, figure: Callable[[str], None]
) -> None:
    """The cache has room for a few of them, so requests wait, and are preempted."""
    exact = RealModel.load(real_model.file, device="cuda")
    rounded = RealModel.load(real_model.file, torch.bfloat16, "cuda")
    requests, params = long_tail(exact.encode, _REQUESTS)
    llm = _llm(real_model, kv_cache_tokens=2048, block_size=16, max_batch_size=128)
    llm.generate(requests[:200], params[:200])  # compiles kernels, and captures graphs
    llm.engine.reset_prefix_cache()
    start = perf_counter()
    outputs = llm.generate(requests, params)
    seconds = perf_counter() - start
    preempted = llm.engine.path_counts[EnginePath.RECOMPUTED]
    assert preempted > 0
    tokens = sum(len(each.token_ids) for each in outputs)
    ours, theirs = _errors(outputs, exact, rounded)
    figure(
        f"{real_model.name}, {_REQUESTS} requests of {percentiles(map(len, requests))} prompt "
        f"tokens and {percentiles(len(each.token_ids) for each in outputs)} new ones (median, "
        f"90 %, most), {preempted} times preempted in both runs: "
        f"{tokens / seconds:,.0f} tokens per second; log-probabilities {_mean_and_most(ours)} from "
        f"those in float32, of transformers {_mean_and_most(theirs)}"
    )
    assert ours.mean() <= 1.2 * theirs.mean()


def test_decode_rate(real_model: RealModel, figure: Callable[[str], None]) -> None:
    llm = _llm(real_model)
    params = SamplingParams(temperature=0, max_new_tokens=256, ignore_eos=True)
    for batch in (1, 16, 64):
        questions = prompts()[4::3][:batch]
        llm.generate(questions, params)
        rates = []
        for _ in range(3):
            llm.engine.reset_prefix_cache()
            start = perf_counter()
            outputs = llm.generate(questions, params)
            rates.append(sum(len(each.token_ids) for each in outputs) / (perf_counter() - start))
        assert {len(each.token_ids) for each in outputs} == {256}
        figure(f"{real_model.name}, {batch} at once: {sorted(rates)[1]:,.0f} tokens per second")
