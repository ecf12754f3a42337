"""Models whose layers have windows: what leaves them is given back, and every text stays right."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from roseinfer import LLM, EnginePath, SamplingParams
from tests.models.families import CONFIGS, SHAPE, VOCABULARY, scaled_up

WINDOW = 7
_KINDS = {"s": "sliding_attention", "f": "full_attention"}


def _gemma3() -> Any:
    """Return one whose three layers with windows make two groups, beside one of two layers."""
    layers = [_KINDS[kind] for kind in "ssfsf"]
    shape = SHAPE | {"num_hidden_layers": len(layers), "head_dim": 12}
    return transformers.Gemma3TextConfig(**shape, sliding_window=WINDOW, layer_types=layers)


MODELS = {name: CONFIGS[name] for name in ("mistral window", "gemma2", "gpt-oss")}
MODELS["gemma3"] = _gemma3
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"resident_decode": False},
    "resident": {"resident_decode": True, "run_ahead": 2},
    "in chunks": {"resident_decode": True, "run_ahead": 3, "prefill_max_tokens": 5},
    "prefixes": {"resident_decode": True, "run_ahead": 0, "prefix_cache": True},
    "lists of every layer": {"per_layer_kv": True, "resident_decode": False},
}


def build(name: str) -> Any:
    torch.manual_seed(1)
    return scaled_up(transformers.AutoModelForCausalLM.from_config(MODELS[name]()))


@cache
def alone(name: str) -> Any:
    model = build(name)
    model.set_attn_implementation("eager")
    return model


@cache
def next_token(name: str, tokens: tuple[int, ...]) -> int:
    with torch.no_grad():
        logits = alone(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return int(logits.argmax())


def continued(name: str, prompt: list[int], count: int) -> list[int]:
    tokens = tuple(prompt)
    for _ in range(count):
        tokens += (next_token(name, tokens),)
    return list(tokens[len(prompt) :])


def served(name: str, device: str, tokens: int = 100, **how: Any) -> LLM:
    """Serve a model on a cache full of NaN."""
    llm = LLM(build(name), device=device, block_size=4, kv_cache_tokens=tokens, **how)
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


@pytest.mark.many_alike
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_texts_that_begin_alike_in_a_small_cache(device: str, name: str, way: str) -> None:
    draw = random.Random(len(name) + len(way))
    beginning = [draw.randrange(VOCABULARY) for _ in range(30)]
    llm = served(name, device, **WAYS[way])
    prompts = [
        beginning[: draw.randrange(28)] + [draw.randrange(VOCABULARY) for _ in range(1, 5)]
        for _ in range(7)
    ]
    counts = [draw.randrange(1, 18) for _ in prompts]
    outputs = llm.generate(prompts, [greedy(count) for count in counts], progress=False)
    for prompt, count, output in zip(prompts, counts, outputs, strict=True):
        assert output.token_ids == continued(name, prompt, count)
    assert (llm.engine.path_counts[EnginePath.FREED_OUT_OF_WINDOW] > 0) is (
        way != "lists of every layer"
    )
    assert_nothing_held(llm)


def test_a_long_text_in_a_cache_of_a_few_windows(device: str) -> None:
    """Mistral alone needs what its window holds; with a layer that sees all, all is needed."""
    llm = served("mistral window", device, 28, prefill_max_tokens=8)
    prompt = list(range(40))
    (output,) = llm.generate([prompt], greedy(50), progress=False)
    assert output.token_ids == continued("mistral window", prompt, 50)
    (output,) = served("gemma2", device, 28, prefill_max_tokens=8).generate(
        [prompt], greedy(50), progress=False
    )
    assert output.error is not None
    assert "take 28 blocks of 4 tokens, and the KV cache has 14" in output.error


@pytest.mark.parametrize("name", ["mistral window", "gemma3"])
def test_a_beginning_is_found_though_its_first_windows_are_gone(device: str, name: str) -> None:
    """A second prompt behind the same 32 tokens begins where they end, and what was evicted of
    them is kept again once it was computed again."""
    llm = served(name, device, 120, prefix_cache=True, prefill_max_tokens=16)
    kv, prefixes = llm.engine.sequence_runner.kv, llm.engine.prefixes
    assert prefixes is not None
    beginning = [(7 * at + 3) % VOCABULARY for at in range(32)]

    def ask(last: int) -> int:
        hits = llm.engine.path_counts[EnginePath.PREFIX_HIT]
        prompt = [*beginning, last, last]
        (output,) = llm.generate([prompt], greedy(6), progress=False)
        assert output.token_ids == continued(name, prompt, 6)
        return llm.engine.path_counts[EnginePath.PREFIX_HIT] - hits

    assert [ask(1), ask(2)] == [0, 1]
    prefixes.evict(kv.max_blocks_per_layer)
    assert [ask(3), ask(4)] == [0, 1]
    assert_nothing_held(llm)


def test_what_every_layer_sees_is_kept_by_default(device: str) -> None:
    """A window as long as the longest text is none."""
    llm = LLM(
        build("mistral window"), device=device, block_size=4, kv_cache_tokens=40, max_length=6
    )
    assert [group.window for group in llm.engine.sequence_runner.kv.groups] == [None]
