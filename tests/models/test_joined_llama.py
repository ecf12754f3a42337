"""Llama and its kin by few torch operations, the default on a CPU: equal to their own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roseinfer import LLM, EnginePath
from roseinfer.models.causal import CausalModel
from roseinfer.models.joined_llama import JoinedLlama
from roseinfer.models.tiny import byte_tokenizer
from tests.engine.continuations import greedy
from tests.models.fused.test_llama import KIN, PROMPTS, network

JOINED = [name for name in KIN if name not in ("olmo2", "mixtral", "qwen3 moe", "olmoe")]
PARAMS = greedy(9, ignore_eos=True, logprobs=True, prompt_logprobs=True)


def llm_of(model: Any, **config: Any) -> LLM:
    tokenizer = byte_tokenizer(model.config.vocab_size)
    return LLM(model, tokenizer=tokenizer, device="cpu", **config)


def model_of(llm: LLM) -> CausalModel:
    return llm.engine.sequence_runner.model


@pytest.mark.parametrize("kin", JOINED)
def test_completions_are_those_of_the_own_modules(kin: str) -> None:
    """In prompts, chunks of them and decode steps, alone and in company."""
    joined = llm_of(network(kin, "cpu"), prefill_max_tokens=9)
    plain = llm_of(network(kin, "cpu"), prefill_max_tokens=9, fused_model=False)
    assert isinstance(model_of(joined), JoinedLlama)
    assert type(model_of(plain)) is CausalModel
    actual = joined.generate(PROMPTS, PARAMS, progress=False)
    expected = plain.generate(PROMPTS, PARAMS, progress=False)
    for one, other in zip(actual, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)
    counts = joined.engine.path_counts
    assert counts[EnginePath.JOINED] > 9
    assert EnginePath.JOINED not in plain.engine.path_counts


@pytest.mark.parametrize("kin", ["olmo2", "mixtral"])
def test_other_families_run_on_their_own_modules(kin: str) -> None:
    assert type(model_of(llm_of(network(kin, "cpu")))) is CausalModel


def test_model_that_computes_something_else_runs_on_its_own_modules() -> None:
    """Such as one with an adapter, which changes what a module returns, not its weights."""
    model, alone = network("llama", "cpu"), network("llama", "cpu")
    for each in (model, alone):
        each.model.layers[1].mlp.down_proj.register_forward_hook(lambda *call: 5 * call[-1])
    llm = llm_of(model)
    assert type(model_of(llm)) is CausalModel
    outputs = llm.generate(PROMPTS, greedy(1, ignore_eos=True), progress=False)
    with torch.inference_mode():
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.token_ids == [int(alone(torch.tensor([prompt])).logits[0, -1].argmax())]


def test_weights_are_updated_where_they_are_joined() -> None:
    llm, other = llm_of(network("llama", "cpu")), network("llama", "cpu")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(torch.linspace(-1, 1.5, weight.shape[-1]))
    expected = llm_of(other).generate(PROMPTS, greedy(5, ignore_eos=True), progress=False)
    before = llm.generate(PROMPTS, greedy(5, ignore_eos=True), progress=False)
    llm.update_weights(dict(other.named_parameters()))
    actual = llm.generate(PROMPTS, greedy(5, ignore_eos=True), progress=False)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert [each.token_ids for each in actual] != [each.token_ids for each in before]
