"""This distribution's own engine, serving small models."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.targets.own import engine_models as models
from pytest_roseinfer.targets.own.engine_tokenizers import tokenizer
from pytest_roseinfer.targets.own.roseinfer_draws import draw
from roseinfer import AttentionPath, EnginePath, SamplingBatch, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.mix import RequestMix, Sampling

_ALONE = "transformers"
"""The slow twin: a model's own attention, without a cache, batches, or any code of ours."""
_RUN_AHEAD = (0, 1, 3)

_IN_CHUNKS = {"chunked_prefill": True, "prefill_max_tokens": 3}
_KERNELS = {"paged_attention": True}
_RESIDENT = {"resident_decode": True, "per_layer_kv": False}
_RESIDENT_KERNELS = {**_RESIDENT, **_KERNELS}
_REUSED_AT_ONCE = {**_RESIDENT, "prefix_cache": False, "max_batch_size": 8}
"""A new sequence takes what another one gave up while others still decode beside it."""
_ONE_BY_ONE = {**_RESIDENT, "prefill_max_batch_size": 1, "max_batch_size": 8}
"""Sequences begin to decode one after another, and none ends in between."""
_TWO_AT_ONCE = {**_RESIDENT, **_IN_CHUNKS, "prefix_cache": True, "max_batch_size": 2}
_PACKED = {"prefill_admission_policy": "pack", "prefill_max_tokens": 8, "max_batch_size": 8}


def _with_models(settings: Mapping[str, Any], *others: str) -> list[Mapping[str, Any]]:
    return [settings, *({**settings, "model": name} for name in others)]


_RUNS_WITH: Mapping[EnginePath, Sequence[Mapping[str, Any]]] = {
    EnginePath.RESIDENT: [_RESIDENT, _REUSED_AT_ONCE, _ONE_BY_ONE, _TWO_AT_ONCE],
    EnginePath.RUN_AHEAD: [{**_RESIDENT, "run_ahead": 2}, {**_REUSED_AT_ONCE, "run_ahead": 3}],
    EnginePath.BATCHED: (),
    EnginePath.MIXED: (),
    EnginePath.CHUNKED: [_IN_CHUNKS],
    EnginePath.OVERTAKEN: [_PACKED],
    EnginePath.PREFIX_HIT: [{"prefix_cache": True}],
    EnginePath.RESUMED: [{"max_batch_size": 8}],
    EnginePath.FORKED: (),
    EnginePath.PADDED_HEAD: [{"pad_head": True, "model": models.ODD}],
    EnginePath.GRAPH: [
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 0},
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 2},
        {**_RESIDENT_KERNELS, "cuda_graph": True, "run_ahead": 2, "fused_model": True},
    ],
    EnginePath.CANCELLED: (),
    EnginePath.FUSED: [{"fused_model": True, "model": "gpt2"}],
    EnginePath.LIKELIEST: [_RESIDENT_KERNELS],
}
"""Only ``COMPILED`` is missing. To compile takes seconds for every model of every mix, so no
switch here asks for it, and ``tests/engine/test_compiling.py`` compares it with its twin."""
_FIRST = (
    EnginePath.RESIDENT,
    EnginePath.RUN_AHEAD,
    EnginePath.PADDED_HEAD,
    EnginePath.LIKELIEST,  # which runs most of the kernels
)
_OF_KERNELS = 0.25
"""A mix takes 15 times as long with them as without, under Triton's interpreter."""
_SHARES = {
    **dict.fromkeys((EnginePath.RESIDENT, EnginePath.RUN_AHEAD), 3.0),
    **dict.fromkeys((EnginePath.FUSED, EnginePath.LIKELIEST), _OF_KERNELS),
}


def _alone_equals(path: EnginePath) -> FastPath:
    return FastPath(_ALONE, _RUNS_WITH[path], share=_SHARES.get(path, 1.0))


class RoseinferEngine(EngineAdapter):
    """``LLM``, driven step by step on a cache full of NaN."""

    vocabulary = models.VOCABULARY
    most_tokens = models.POSITIONS
    lag = max(_RUN_AHEAD)
    takes_min_p = True
    paths: ClassVar[Mapping[str, FastPath]] = {
        # Searches aim at them in this order: where most bugs were, and then kernels.
        **{path.value: _alone_equals(path) for path in _FIRST},
        AttentionPath.DECODE_TRITON.value: FastPath(
            AttentionPath.REFERENCE.value,
            _with_models(_KERNELS, "llama", "llama 10:2"),
            share=_OF_KERNELS,
        ),
        AttentionPath.APPEND_AND_ATTEND.value: FastPath(
            AttentionPath.SLOTS_REFERENCE.value,
            _with_models(_RESIDENT_KERNELS, "llama", "llama 32:2"),
            share=_OF_KERNELS,
        ),
        AttentionPath.CHUNK_TRITON.value: FastPath(
            AttentionPath.REFERENCE.value,
            _with_models(_KERNELS, "llama 10:2"),
            share=_OF_KERNELS,
        ),
        **{path.value: _alone_equals(path) for path in _RUNS_WITH},
        EnginePath.GRAPH.value: FastPath(_ALONE, _RUNS_WITH[EnginePath.GRAPH], device="cuda"),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "model": ("gpt2", "llama", "llama 10:2", "llama 24:3", "llama 32:2"),
        "prefix_cache": (True, False),
        "prefill_admission_policy": ("fifo", "pack"),
        "prefill_max_tokens": (100, 1, 3, 8),
        "prefill_max_batch_size": (8, 1, 2),
        "max_batch_size": (8, 1, 2, 3),
        "chunked_prefill": (True, False),
        "per_layer_kv": (False, True),
        "resident_decode": (False, True),
        "run_ahead": _RUN_AHEAD,
        # Under Triton's interpreter a step takes a hundred times as long, so only where aimed at.
        "paged_attention": (False,),
        "fused_model": (False,),
        "pad_head": (False,),
        # Capturing takes seconds, so only where aimed at.
        "cuda_graph": (False,),
    }

    longest = models.LONG_POSITIONS
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "model": models.OF_MANY_SHAPES,
        "max_batch_size": (8, 1, 17, 3, 64, 128),
        "prefill_max_tokens": (2048, 16, 100, 333),
        "prefill_max_batch_size": (16, 1, 128),
        "run_ahead": _RUN_AHEAD,
        "resident_decode": (True, True, False),
        "cuda_graph": (False, True),
        "paged_attention": (True, True, False),
        "fused_model": (True, False),
        "pad_head": (True, False),
        "prefix_cache": (True, False),
        "chunked_prefill": (True, False),
    }

    def make(self, mix: RequestMix) -> None:
        from roseinfer import LLM  # with transformers, which takes seconds

        options = dict(mix.options)
        options["resident_decode"] &= not options["per_layer_kv"]
        model = options.pop("model")
        self._tokenizer = tokenizer(byte_level="gpt2" in model)
        self._shown: defaultdict[int, list[str]] = defaultdict(list)
        self.llm = LLM(
            _served(model, mix.device),
            tokenizer=self._tokenizer,
            device=mix.device,
            block_size=mix.block_size,
            kv_cache_tokens=mix.cache_tokens,
            **options,
        )
        self.engine = self.llm.engine
        kv = self.engine.sessions.kv
        for cache in (kv.keys, kv.values):
            cache.fill_(float("nan"))

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        return self.engine.submit(prompt, _params(sampling))

    def cancel(self, request: Any) -> None:
        self.engine.cancel(request)

    def step(self) -> None:
        for update in self.engine.step():
            self._shown[update.request.id].append(update.text)

    def tokens(self, request: Any) -> list[int]:
        return list(request.token_ids)

    def ended(self, request: Any) -> bool:
        return request.finish_reason is not None

    def leftovers(self) -> str:
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        kv = self.engine.sessions.kv
        held = {
            layer: kv.max_blocks_per_layer - 1 - kv.num_free_blocks(layer)
            for layer in range(0, kv.num_layers, kv.layers_per_group)
        }
        return ", ".join(f"{count} blocks of layer {at}" for at, count in held.items() if count)

    def path_counts(self) -> Mapping[str, int]:
        return {str(name): count for name, count in self.engine.path_counts.items()}

    def alone(self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix) -> list[int]:
        return list(_alone(mix.options["model"], mix.device, tuple(prompt), sampling))

    def forked(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        sessions = self.engine.sessions
        (first,), logits = sessions.prefill([list(prompt)])
        forks = [first, *(sessions.fork(first) for _ in samplings[1:])]
        logits = logits.expand(len(forks), -1)
        going = list(zip(forks, samplings, strict=True))
        while going:
            chosen = _choose(
                logits, [own for _, own in going], [fork.token_ids for fork, _ in going]
            )
            for (fork, _), token in zip(going, chosen, strict=True):
                fork.token_ids.append(token)
            going = [
                (fork, own) for fork, own in going if _goes_on(fork.token_ids, len(prompt), own)
            ]
            if going:
                logits = sessions.extend([fork for fork, _ in going])
        found = [fork.token_ids[len(prompt) :] for fork in forks]
        for fork in forks:
            sessions.release(fork)
        return found

    def undecided(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        logits = models.logits(mix.options["model"], mix.device, tuple(tokens))
        noise = np.random.default_rng(0).standard_normal((16, len(logits)))
        nearly = logits + noise * np.abs(logits).max() * self.rounding
        return len({draw(each, sampling, tokens) for each in (logits, *nearly)}) > 1

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Sequence[float]:
        logits: list[float] = models.logits(
            mix.options["model"], mix.device, tuple(tokens)
        ).tolist()
        return logits

    def logprobs(self, request: Any) -> Sequence[float]:
        found: list[float] = request.logprobs
        return found

    def pieces(self, request: Any) -> Sequence[str]:
        return self._shown[request.id]

    def decoded(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def stage(self, request: Any) -> str:
        if not (request.session.stored or request.in_flight):
            return "preempted" if request.preempted else "waiting"
        stored = request.session.stored >= request.prompt_length
        return "decoding" if stored or request.in_flight else "prefilling"


_served = lru_cache(maxsize=16)(models.network)


@lru_cache(maxsize=4096)
def _alone(name: str, device: str, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    tokens = list(prompt)
    positions = models.LONG_POSITIONS if name in models.OF_MANY_SHAPES else models.POSITIONS
    while len(tokens) < positions and _goes_on(tokens, len(prompt), sampling):
        tokens.append(draw(models.logits(name, device, tuple(tokens)), sampling, tokens))
    return tuple(tokens[len(prompt) :])


def _goes_on(tokens: Sequence[int], prompted: int, sampling: Sampling) -> bool:
    new = tokens[prompted:]
    ended = bool(new) and new[-1] == models.END and not sampling.ignore_eos
    return len(new) < sampling.max_new_tokens and not ended


def _params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(**asdict(sampling))


def _choose(
    logits: torch.Tensor, samplings: Sequence[Sampling], tokens: Sequence[Sequence[int]]
) -> list[int]:
    """Choose the next token of each fork by the engine's own sampling."""
    params, seeds = [_params(each) for each in samplings], [each.seed for each in samplings]
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for row, own in enumerate(tokens):
        seen[row, list(own)] = samplings[row].repetition_penalty != 1
    positions = torch.tensor([len(own) for own in tokens], device=logits.device)
    batch = SamplingBatch.of(params, seeds, logits.device)
    chosen: list[int] = batch.choose(logits, positions, seen).tolist()
    return chosen
