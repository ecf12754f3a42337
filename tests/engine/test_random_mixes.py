"""Whatever is asked for at the same time, each gets what transformers would give it alone."""

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
"""In one test, of which there are two for each family."""
MOST_NEW = 40
LONGEST_PROMPT = 26
POOL = 40
CLEAR_CUT = 1e-3
"""Between the two likeliest tokens: more than rounding moves a logit."""
ENDS = (5, 17, 60)
MUST_HAPPEN = (
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
class Known:
    """A prompt, and what transformers continues it with."""

    prompt: list[int]
    continuation: list[int]

    def expected(self, params: SamplingParams) -> list[int]:
        tokens = self.continuation[: params.max_new_tokens]
        ends = [at for at, token in enumerate(tokens, 1) if token in ENDS]
        return tokens if params.ignore_eos or not ends else tokens[: ends[0]]


@dataclass(frozen=True)
class Asked:
    """One request of a mix, in steps since its begin."""

    arrives: int
    known: Known
    params: SamplingParams
    cancelled: int | None

    @property
    def most_stored(self) -> int:
        return len(self.known.prompt) + self.params.max_new_tokens - 1


@cache
def served(family: str, device: str) -> Any:
    """The model that all engines of a family share."""
    model = tiny(family, device)
    model.config.eos_token_id = ENDS[0]
    model.generation_config.eos_token_id = list(ENDS[1:])
    return model


@cache
def known_prompts(family: str, device: str) -> list[Known]:
    """Prompts that begin alike, and prompts that go on with what others were answered."""
    rng = random.Random(family)
    stems = [_words(rng, LONGEST_PROMPT) for _ in range(3)]
    first, second = [], []
    for _ in range(POOL):
        kept = rng.choice(stems)[: rng.randint(0, LONGEST_PROMPT // 2)]
        own = _words(rng, rng.randint(not kept, 5))
        repeats = rng.choice([1, LONGEST_PROMPT])
        first.append((kept + own * repeats)[:LONGEST_PROMPT])
    known = without_ties(family, device, first)
    for one in known:
        answered = one.prompt + one.continuation[: rng.randint(0, MOST_NEW)]
        second.append((answered + _words(rng, rng.randint(0, 3)))[:LONGEST_PROMPT])
    return known + without_ties(family, device, second)


def without_ties(family: str, device: str, prompts: list[list[int]]) -> list[Known]:
    """Return prompts with their continuations, except where rounding might decide."""
    continued, gaps = greedy(tiny(family, device), prompts, MOST_NEW)
    clear = [gap > CLEAR_CUT for gap in gaps]
    assert sum(clear) > 0.8 * len(prompts), "too many ties: the weights are too small"
    return [
        Known(prompt, tokens)
        for prompt, tokens, is_clear in zip(prompts, continued, clear, strict=True)
        if is_clear
    ]


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
    """Generate by whole forward passes. Padding stands behind a prompt, where nothing sees it."""
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


def draw_requests(rng: random.Random, known: list[Known]) -> list[Asked]:
    busy = rng.choice([0, 3, 15])
    return [
        Asked(
            arrives=rng.randint(0, busy),
            known=rng.choice(known),
            params=SamplingParams(
                temperature=0.0,
                max_new_tokens=rng.choice([rng.randint(1, 12), rng.randint(1, MOST_NEW)]),
                ignore_eos=rng.random() < 0.7,
            ),
            cancelled=rng.choice([None, None, None, None, rng.randint(0, 15)]),
        )
        for _ in range(rng.choice([rng.randint(1, 8), 12]))
    ]


def draw_settings(rng: random.Random, requests: list[Asked]) -> dict[str, Any]:
    """The cache is sometimes just as large as the largest request."""
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    per_layer = rng.random() < 0.2
    largest = max(request.most_stored for request in requests)
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
def most_steps_exact(llm: LLM) -> Iterator[None]:
    """Give no block early in three of four steps, and require that these take what they counted.

    Blocks given early hide a step that counts too few, except in a cache that is nearly full.
    """
    runner, kv = llm.engine._runner, llm.engine.sequence_runner.kv
    launch, early_blocks = runner.launch, runner._early_blocks
    numbers = count()

    def counted(step: Step) -> Any:
        exact = next(numbers) % 4 > 0
        runner._early_blocks = (lambda *_: 0) if exact else early_blocks  # type: ignore[method-assign]
        before = kv.num_free_blocks(0)
        flights = launch(step)
        taken = before - kv.num_free_blocks(0)
        assert not exact or taken <= step.max_blocks_needed, (
            f"{taken} blocks taken, {step.max_blocks_needed} counted"
        )
        return flights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", counted)
        patch.setattr(runner, "_early_blocks", early_blocks)
        yield


def run(llm: LLM, asked: list[Asked]) -> list[Request]:
    """Run all requests, each submitted and cancelled at its step."""
    engine = llm.engine
    requests: dict[int, Request] = {}
    for step in range(2000):
        for at, one in enumerate(asked):
            if one.arrives == step:
                requests[at] = engine.submit(one.known.prompt, one.params)
            if one.cancelled is not None and one.arrives + one.cancelled == step:
                engine.cancel(requests[at])
        engine.step()
        if len(requests) == len(asked) and not engine.has_work:
            return [requests[at] for at in range(len(asked))]
    raise AssertionError("requests that never end")


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
    asked = draw_requests(rng, known_prompts(family, device))
    settings = draw_settings(rng, asked)
    llm = LLM(served(family, device), device=device, **settings)
    kv = llm.engine.sequence_runner.kv
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    with most_steps_exact(llm):
        ended = run(llm, asked)
    for one, request in zip(asked, ended, strict=True):
        want = one.known.expected(one.params)
        assert request.error is None
        if request.finish_reason == "cancelled":
            want = want[: request.num_generated]
            assert one.cancelled is not None
        elif want[-1] in ENDS and not one.params.ignore_eos:
            assert request.finish_reason == "stop"
        else:
            assert request.finish_reason == "length"
        assert request.token_ids == want
    assert_no_block_is_lost(llm)
    counts = llm.engine.path_counts
    counts["evicted"] = llm.engine.prefixes.num_evictions if llm.engine.prefixes else 0
    return counts


@pytest.mark.many_alike
@pytest.mark.parametrize("first", [0, MIXES])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_request_of_a_mix_ends_as_transformers_would(
    device: str, family: str, first: int
) -> None:
    """Every path was taken by some of the mixes."""
    taken: Counter[str] = Counter()
    for seed in range(first, first + MIXES):
        print(f"the mix of {family} with seed {seed}")
        taken += run_mix(family, device, seed)
    rare = {EnginePath.ADMITTED_OUT_OF_ORDER} if family in WINDOWED else set()
    assert [path for path in MUST_HAPPEN if not taken[path] and path not in rare] == []
