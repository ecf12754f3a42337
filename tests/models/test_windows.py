"""Models with attention windows: blocks out of the window are freed, and tokens stay correct."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from roseinfer import LLM, EnginePath, SamplingParams
from roseinfer.kv.pool import SCRATCH
from tests.models.families import CONFIGS, SHAPE, VOCABULARY, scale_weights_up

WINDOW = 7
_KINDS = {"s": "sliding_attention", "f": "full_attention"}


def _gemma3() -> Any:
    """Return a config whose three window layers make two groups, next to a group of two layers."""
    layers = [_KINDS[kind] for kind in "ssfsf"]
    shape = SHAPE | {"num_hidden_layers": len(layers), "head_dim": 12}
    return transformers.Gemma3TextConfig(**shape, sliding_window=WINDOW, layer_types=layers)


MODELS = {name: CONFIGS[name] for name in ("mistral window", "gemma2", "gpt-oss")}
MODELS["gemma3"] = _gemma3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"resident_decode": False},
    "resident": {"resident_decode": True, "run_ahead": 2},
    "chunks": {"resident_decode": True, "run_ahead": 3, "prefill_max_tokens": 5},
    "prefixes": {"resident_decode": True, "run_ahead": 0, "prefix_cache": True},
    "per-layer blocks": {"per_layer_kv": True, "resident_decode": False},
}


def build(name: str) -> Any:
    torch.manual_seed(1)
    return scale_weights_up(transformers.AutoModelForCausalLM.from_config(MODELS[name]()))


@cache
def reference_model(name: str) -> Any:
    model = build(name)
    model.set_attn_implementation("eager")
    return model


@cache
def next_token(name: str, tokens: tuple[int, ...]) -> int:
    with torch.no_grad():
        logits = reference_model(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return int(logits.argmax())


def reference_continuation(name: str, prompt: list[int], count: int) -> list[int]:
    tokens = tuple(prompt)
    for _ in range(count):
        tokens += (next_token(name, tokens),)
    return list(tokens[len(prompt) :])


def engine_for(name: str, device: str, tokens: int = 100, **options: Any) -> LLM:
    """Build an engine for a model on a cache full of NaN."""
    llm = LLM(build(name), device=device, block_size=4, kv_cache_tokens=tokens, **options)
    kv = llm.engine.sequence_runner.kv
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return llm


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)


def assert_nothing_held(llm: LLM) -> None:
    prefixes, kv = llm.engine.prefixes, llm.engine.sequence_runner.kv
    if prefixes:
        prefixes.clear()
        assert prefixes.num_evictable_blocks == 0
    for group in kv.groups:
        assert kv.num_free_blocks(group.layers[0]) == kv.max_blocks_per_layer - 1


@pytest.mark.sampled_cases
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_shared_prefixes_in_a_small_cache(device: str, name: str, setting: str) -> None:
    draw = random.Random(len(name) + len(setting))
    prefix = [draw.randrange(VOCABULARY) for _ in range(30)]
    llm = engine_for(name, device, **SETTINGS[setting])
    prompts = [
        prefix[: draw.randrange(28)] + [draw.randrange(VOCABULARY) for _ in range(1, 5)]
        for _ in range(7)
    ]
    counts = [draw.randrange(1, 18) for _ in prompts]
    outputs = llm.generate(prompts, [greedy(count) for count in counts], progress=False)
    for prompt, count, output in zip(prompts, counts, outputs, strict=True):
        assert output.token_ids == reference_continuation(name, prompt, count)
    assert (llm.engine.path_counts[EnginePath.FREED_OUT_OF_WINDOW] > 0) is (
        setting != "per-layer blocks"
    )
    assert_nothing_held(llm)


def test_long_completion_in_a_cache_of_a_few_windows(device: str) -> None:
    """Mistral needs only the blocks of its window; a model with a full layer needs all blocks."""
    llm = engine_for("mistral window", device, 28, prefill_max_tokens=8)
    prompt = list(range(40))
    (output,) = llm.generate([prompt], greedy(50), progress=False)
    assert output.token_ids == reference_continuation("mistral window", prompt, 50)
    (output,) = engine_for("gemma2", device, 28, prefill_max_tokens=8).generate(
        [prompt], greedy(50), progress=False
    )
    assert output.error is not None
    assert "take 28 blocks of 4 tokens, and the KV cache has 14" in output.error


@pytest.mark.parametrize("name", ["mistral window", "gemma3"])
def test_prefix_hits_although_its_first_windows_were_freed(device: str, name: str) -> None:
    """A second prompt with the same 32 first tokens begins where they end.

    Evicted blocks of them are cached again once they are computed again.
    """
    llm = engine_for(name, device, 120, prefix_cache=True, prefill_max_tokens=16)
    kv, prefixes = llm.engine.sequence_runner.kv, llm.engine.prefixes
    assert prefixes is not None
    prefix = [(7 * at + 3) % VOCABULARY for at in range(32)]

    def count_hits(last: int) -> int:
        hits = llm.engine.path_counts[EnginePath.PREFIX_HIT]
        prompt = [*prefix, last, last]
        (output,) = llm.generate([prompt], greedy(6), progress=False)
        assert output.token_ids == reference_continuation(name, prompt, 6)
        return llm.engine.path_counts[EnginePath.PREFIX_HIT] - hits

    assert [count_hits(1), count_hits(2)] == [0, 1]
    prefixes.evict(kv.max_blocks_per_layer)
    assert [count_hits(3), count_hits(4)] == [0, 1]
    assert_nothing_held(llm)


def test_blocks_of_tokens_in_flight_are_within_the_limit_of_a_request(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that leave a window are freed once the tokens after it are read back."""
    llm = engine_for("mistral window", device, resident_decode=True, run_ahead=8)
    monkeypatch.setattr(llm.engine._runner, "_early_blocks", lambda *_: 0)
    request = llm.engine.submit([3], greedy(40))
    num_held = []
    while llm.engine.has_work:
        llm.engine.step()
        (block_ids,) = request.sequence.block_lists
        num_held.append(len(block_ids) - block_ids.count(SCRATCH))
    limits = llm.engine.request_limits.block_requirements
    limits_in_step = replace(limits, max_steps_in_flight=0)
    assert max(num_held) > limits_in_step.max_blocks_of_request(1, 41)
    assert max(num_held) <= limits.max_blocks_of_request(1, 41)


def test_window_that_covers_max_length_groups_as_full_attention(device: str) -> None:
    """A window as long as the longest text is dropped."""
    llm = LLM(
        build("mistral window"), device=device, block_size=4, kv_cache_tokens=40, max_length=6
    )
    assert [group.window for group in llm.engine.sequence_runner.kv.groups] == [None]
