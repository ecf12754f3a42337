"""Random mixes of requests: each request gets what transformers generates for it alone."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, EnginePath, SamplingParams
from tests.models.families import CONFIGS, VOCABULARY, WINDOWED, tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step

MIXES = 25
"""Mixes per test; each family has two tests."""
MAX_NEW_TOKENS = 40
LONGEST_PROMPT = 26
POOL = 40
MIN_LOGIT_GAP = 1e-3
"""Gap between the two top logits that rounding cannot close."""
ENDS = (5, 17, 60)
REQUIRED_PATHS = (
    EnginePath.BATCHED,
    EnginePath.MIXED,
    EnginePath.CHUNKED,
    EnginePath.ADMITTED_OUT_OF_ORDER,
    EnginePath.PREFIX_HIT,
    EnginePath.RECOMPUTED,
    EnginePath.CANCELLED,
    "evicted",
)


@dataclass(frozen=True)
class Reference:
    """A prompt with its continuation by transformers."""

    prompt: list[int]
    continuation: list[int]

    def expected(self, params: SamplingParams) -> list[int]:
        tokens = self.continuation[: params.max_new_tokens]
        ends = [at for at, token in enumerate(tokens, 1) if token in ENDS]
        return tokens if params.ignore_eos or not ends else tokens[: ends[0]]


@dataclass(frozen=True)
class RequestSpec:
    """One request of a mix; times are in steps since its start."""

    arrives: int
    reference: Reference
    params: SamplingParams
    cancelled: int | None

    @property
    def max_stored(self) -> int:
        return len(self.reference.prompt) + self.params.max_new_tokens - 1


@cache
def served(family: str, device: str) -> Any:
    """Return the model that all engines of a family share."""
    model = tiny(family, device)
    model.config.eos_token_id = ENDS[0]
    model.generation_config.eos_token_id = list(ENDS[1:])
    return model


@cache
def references(family: str, device: str) -> list[Reference]:
    """Return prompts with shared prefixes, and prompts that extend completions of others."""
    rng = random.Random(family)
    stems = [_words(rng, LONGEST_PROMPT) for _ in range(3)]
    first, second = [], []
    for _ in range(POOL):
        prefix = rng.choice(stems)[: rng.randint(0, LONGEST_PROMPT // 2)]
        suffix = _words(rng, rng.randint(not prefix, 5))
        repeats = rng.choice([1, LONGEST_PROMPT])
        first.append((prefix + suffix * repeats)[:LONGEST_PROMPT])
    first_references = without_ties(family, device, first)
    for one in first_references:
        conversation = one.prompt + one.continuation[: rng.randint(0, MAX_NEW_TOKENS)]
        second.append((conversation + _words(rng, rng.randint(0, 3)))[:LONGEST_PROMPT])
    return first_references + without_ties(family, device, second)


def without_ties(family: str, device: str, prompts: list[list[int]]) -> list[Reference]:
    """Return prompts with their continuations, except those that rounding might change."""
    continued, gaps = greedy(tiny(family, device), prompts, MAX_NEW_TOKENS)
    clear = [gap > MIN_LOGIT_GAP for gap in gaps]
    assert sum(clear) > 0.8 * len(prompts), "too many ties: the weights are too small"
    return [
        Reference(prompt, tokens)
        for prompt, tokens, is_clear in zip(prompts, continued, clear, strict=True)
        if is_clear
    ]


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
    """Generate by whole forward passes. Padding follows the prompt, and no token attends to it."""
    rows = torch.arange(len(prompts), device=model.device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    tokens = torch.zeros(len(prompts), int(ends.max()) + count, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(model.device)
    gaps = torch.full((len(prompts),), float("inf"), device=model.device)
    for step in range(count):
        top = model(tokens, use_cache=False).logits[rows, ends + step - 1].topk(2)
        gaps = gaps.minimum(top.values[:, 0] - top.values[:, 1])
        tokens[rows, ends + step] = top.indices[:, 0]
    continued = [
        tokens[row, len(prompt) : len(prompt) + count].tolist()
        for row, prompt in enumerate(prompts)
    ]
    return continued, gaps.tolist()


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def draw_requests(rng: random.Random, pool: list[Reference]) -> list[RequestSpec]:
    busy = rng.choice([0, 3, 15])
    return [
        RequestSpec(
            arrives=rng.randint(0, busy),
            reference=rng.choice(pool),
            params=SamplingParams(
                temperature=0.0,
                max_new_tokens=rng.choice([rng.randint(1, 12), rng.randint(1, MAX_NEW_TOKENS)]),
                ignore_eos=rng.random() < 0.7,
            ),
            cancelled=rng.choice([None, None, None, None, rng.randint(0, 15)]),
        )
        for _ in range(rng.choice([rng.randint(1, 8), 12]))
    ]


def draw_settings(rng: random.Random, requests: list[RequestSpec]) -> dict[str, Any]:
    """Draw settings; the cache sometimes just fits the largest request."""
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    per_layer = rng.random() < 0.2
    largest = max(request.max_stored for request in requests)
    return {
        "block_size": block_size,
        "kv_cache_tokens": rng.choice([largest, largest, largest * 3 // 2, largest * 4]),
        "max_batch_size": rng.choice([1, 2, 4, 8]),
        "prefix_cache": rng.random() < 0.7,
        "prefill_admission_policy": rng.choice(["fifo", "pack"]),
        "prefill_max_tokens": rng.choice([1, 5, 16, 100]),
        "prefill_max_batch_size": rng.choice([1, 2, 8]),
        "chunked_prefill": rng.random() < 0.7,
        "per_layer_kv": per_layer,
        "resident_decode": rng.random() < 0.7 and not per_layer,
        "speculation": rng.choice([None, "ngram", "ngram"]),
        "run_ahead": rng.choice([0, 0, 1, 3]),
        "prompt_rows": rng.choice([0, 64]),
        "pad_head": rng.random() < 0.2,
    }


@contextmanager
def check_block_counts(llm: LLM) -> Iterator[None]:
    """Disable early blocks in three of four steps, and check the blocks that these take.

    Early blocks hide a step that counts too few, except in a cache that is nearly full.
    """
    runner, kv = llm.engine._runner, llm.engine.sequence_runner.kv
    launch, early_blocks = runner.launch, runner._early_blocks
    numbers = count()

    def counted(step: Step) -> Any:
        exact = next(numbers) % 4 > 0
        runner._early_blocks = (lambda *_: 0) if exact else early_blocks  # type: ignore[method-assign]
        before = kv.num_free_blocks(0)
        flights = launch(step)
        num_taken = before - kv.num_free_blocks(0)
        assert not exact or num_taken <= step.max_blocks_needed, (
            f"{num_taken} blocks taken, expected at most {step.max_blocks_needed}"
        )
        return flights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", counted)
        patch.setattr(runner, "_early_blocks", early_blocks)
        yield


def run(llm: LLM, specs: list[RequestSpec]) -> list[Request]:
    """Run all requests, each submitted and cancelled at its step."""
    engine = llm.engine
    requests: dict[int, Request] = {}
    for step in range(2000):
        for at, one in enumerate(specs):
            if one.arrives == step:
                requests[at] = engine.submit(one.reference.prompt, one.params)
            if one.cancelled is not None and one.arrives + one.cancelled == step:
                engine.cancel(requests[at])
        engine.step()
        if len(requests) == len(specs) and not engine.has_work:
            return [requests[at] for at in range(len(specs))]
    raise AssertionError("requests never end")


def assert_no_block_is_lost(llm: LLM) -> None:
    kv, prefixes = llm.engine.sequence_runner.kv, llm.engine.prefixes
    firsts = [group.layers[0] for group in kv.groups]
    whole = kv.max_blocks_per_layer - 1
    unused = prefixes.num_evictable_blocks if prefixes else 0
    assert [kv.num_free_blocks(layer) + unused for layer in firsts] == [whole] * len(firsts)
    if prefixes:
        prefixes.clear()
    assert [kv.num_free_blocks(layer) for layer in firsts] == [whole] * len(firsts)


def run_mix(family: str, device: str, seed: int) -> Counter[str]:
    """Compare one mix with transformers, and return the paths it took."""
    rng = random.Random(f"{family} {seed}")
    specs = draw_requests(rng, references(family, device))
    settings = draw_settings(rng, specs)
    llm = LLM(served(family, device), device=device, **settings)
    kv = llm.engine.sequence_runner.kv
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    with check_block_counts(llm):
        finished = run(llm, specs)
    for one, request in zip(specs, finished, strict=True):
        expected = one.reference.expected(one.params)
        assert request.error is None
        if request.finish_reason == "cancelled":
            expected = expected[: request.num_generated]
            assert one.cancelled is not None
        elif expected[-1] in ENDS and not one.params.ignore_eos:
            assert request.finish_reason == "stop"
        else:
            assert request.finish_reason == "length"
        assert request.token_ids == expected
    assert_no_block_is_lost(llm)
    counts = llm.engine.path_counts
    counts["evicted"] = llm.engine.prefixes.num_evictions if llm.engine.prefixes else 0
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, MIXES])
@pytest.mark.parametrize("family", CONFIGS)
def test_requests_of_a_mix_match_transformers(device: str, family: str, first: int) -> None:
    """Some of the mixes take each path."""
    path_counts: Counter[str] = Counter()
    for seed in range(first, first + MIXES):
        print(f"mix of {family} with seed {seed}")
        path_counts += run_mix(family, device, seed)
    rare = {EnginePath.ADMITTED_OUT_OF_ORDER} if family in WINDOWED else set()
    assert [path for path in REQUIRED_PATHS if not path_counts[path] and path not in rare] == []
