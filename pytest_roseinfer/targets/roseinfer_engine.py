"""This distribution's own engine, serving small models."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.targets.engine_models import (
    END,
    LONG_POSITIONS,
    ODD,
    OF_MANY_SHAPES,
    POSITIONS,
    VOCABULARY,
    network,
)
from roseinfer import (
    LLM,
    AttentionPath,
    EnginePath,
    SamplingBatch,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.engines.mix import RequestMix, Sampling

_ALONE = "transformers"
"""Which has the model's own attention, no cache, no batches, and none of our code."""
_ROUNDING = 3e-5
"""Relative, of logits that were computed in batches of other sizes."""


_RUN_AHEAD = (0, 1, 3)
_RESIDENT = {"resident_decode": True, "per_layer_kv": False}
"""Settings with which the state of what decodes is on the device."""
_REUSED_AT_ONCE = {**_RESIDENT, "prefix_cache": False, "max_batch_size": 8}
"""And what one sequence gives up is the next one's, while others decode beside it."""
_ONE_BY_ONE = {**_RESIDENT, "prefill_max_batch_size": 1, "max_batch_size": 8}
"""And they come to decode there one after another, with nobody ending in between."""
_ON_KERNELS = {**_RESIDENT, "paged_attention": True}
_EASY = (EnginePath.RESIDENT, EnginePath.RUN_AHEAD)
_SLOW = (EnginePath.FUSED, EnginePath.LIKELIEST)
_OPTED_IN = (EnginePath.COMPILED,)
"""Compiling takes seconds for every model of every mix, and no switch here asks for it:
``tests/engine/test_compiling.py`` compares it with its twin."""
_IN_ORDER = (
    *_EASY,
    *(path for path in EnginePath if path not in _EASY + _SLOW + _OPTED_IN),
    *_SLOW,
)
"""What takes long under Triton's interpreter is aimed at last."""


class RoseinferEngine(EngineAdapter):
    """``LLM``, driven step by step on a cache full of NaN."""

    vocabulary = VOCABULARY
    most_tokens = POSITIONS
    lag = max(_RUN_AHEAD)
    paths: ClassVar[Mapping[str, FastPath]] = {
        **{path.value: FastPath(equals=_ALONE) for path in _IN_ORDER},
        AttentionPath.DECODE_TRITON.value: FastPath(
            equals=AttentionPath.REFERENCE.value,
            runs_with=[
                {"paged_attention": True},
                {"paged_attention": True, "model": "llama"},
                {"paged_attention": True, "model": "llama 10:2"},
            ],
        ),
        AttentionPath.APPEND_AND_ATTEND.value: FastPath(
            equals=AttentionPath.SLOTS_REFERENCE.value,
            runs_with=[
                _ON_KERNELS,
                {**_ON_KERNELS, "model": "llama"},
                {**_ON_KERNELS, "model": "llama 32:2"},
            ],
        ),
        AttentionPath.CHUNK_TRITON.value: FastPath(
            equals=AttentionPath.REFERENCE.value,
            runs_with=[{"paged_attention": True}, {"paged_attention": True, "model": "llama 10:2"}],
        ),
        EnginePath.FUSED.value: FastPath(
            equals=_ALONE, runs_with=[{"fused_model": True, "model": "gpt2"}]
        ),
        EnginePath.PADDED_HEAD.value: FastPath(
            equals=_ALONE, runs_with=[{"pad_head": True, "model": ODD}]
        ),
        EnginePath.LIKELIEST.value: FastPath(equals=_ALONE, runs_with=[_ON_KERNELS]),
        EnginePath.RESIDENT.value: FastPath(
            equals=_ALONE,
            runs_with=[
                _RESIDENT,
                _REUSED_AT_ONCE,
                _ONE_BY_ONE,
                {**_RESIDENT, "max_batch_size": 2},
            ],
        ),
        EnginePath.RUN_AHEAD.value: FastPath(
            equals=_ALONE,
            runs_with=[{**_RESIDENT, "run_ahead": 2}, {**_REUSED_AT_ONCE, "run_ahead": 3}],
        ),
        EnginePath.GRAPH.value: FastPath(
            equals=_ALONE,
            device="cuda",
            runs_with=[
                *({**_RESIDENT, "cuda_graph": True, "run_ahead": lag} for lag in (0, 2)),
                {**_ON_KERNELS, "cuda_graph": True, "run_ahead": 2, "fused_model": True},
            ],
        ),
        EnginePath.CHUNKED.value: FastPath(
            equals=_ALONE, runs_with=[{"chunked_prefill": True, "prefill_max_tokens": 3}]
        ),
        EnginePath.OVERTAKEN.value: FastPath(
            equals=_ALONE,
            runs_with=[
                {"prefill_admission_policy": "pack", "prefill_max_tokens": 8, "max_batch_size": 8}
            ],
        ),
        EnginePath.PREFIX_HIT.value: FastPath(equals=_ALONE, runs_with=[{"prefix_cache": True}]),
        EnginePath.RESUMED.value: FastPath(equals=_ALONE, runs_with=[{"max_batch_size": 8}]),
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

    longest = LONG_POSITIONS
    sizes: ClassVar[Mapping[str, Sequence[Any]]] = {
        "model": OF_MANY_SHAPES,
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
        options = dict(mix.options)
        options["resident_decode"] &= not options["per_layer_kv"]
        self.llm = LLM(
            _served(options.pop("model"), mix.device),
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
        self.engine.step()

    def tokens(self, request: Any) -> list[int]:
        token_ids: list[int] = request.token_ids
        return token_ids

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
        going = list(range(len(forks)))
        while going:
            chosen = _choose(
                logits,
                [samplings[at] for at in going],
                [forks[at].token_ids for at in going],
            )
            for at, token in zip(going, chosen, strict=True):
                forks[at].token_ids.append(token)
            going = [
                at
                for at, token in zip(going, chosen, strict=True)
                if len(forks[at].token_ids) - len(prompt) < samplings[at].max_new_tokens
                and (token != END or samplings[at].ignore_eos)
            ]
            if going:
                logits = sessions.extend([forks[at] for at in going])
        found = [fork.token_ids[len(prompt) :] for fork in forks]
        for fork in forks:
            sessions.release(fork)
        return found

    def undecided(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        logits = _logits(mix.options["model"], mix.device, tokens)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn((16, logits.shape[1]), generator=generator).to(logits.device)
        nearly = torch.cat([logits, logits + noise * logits.abs().max() * _ROUNDING])
        rows = len(nearly)
        return len(set(_choose(nearly, [sampling] * rows, [tokens] * rows))) > 1


@lru_cache(maxsize=16)
def _served(name: str, device: str) -> Any:
    """The network that the engine makes its own."""
    return network(name, device)


@lru_cache(maxsize=16)
def _original(name: str, device: str) -> Any:
    return network(name, device)


@lru_cache(maxsize=4096)
def _alone(name: str, device: str, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    tokens = list(prompt)
    positions = _original(name, device).config.max_position_embeddings
    for _ in range(min(sampling.max_new_tokens, positions - len(prompt))):
        (chosen,) = _choose(_logits(name, device, tokens), [sampling], [tokens])
        tokens.append(chosen)
        if chosen == END and not sampling.ignore_eos:
            break
    return tuple(tokens[len(prompt) :])


def _logits(name: str, device: str, tokens: Sequence[int]) -> torch.Tensor:
    """Of the next token, all of it computed anew."""
    ids = torch.tensor([list(tokens)], device=device)
    logits: torch.Tensor = _original(name, device)(ids, use_cache=False).logits[:, -1]
    return logits


def _params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def _choose(
    logits: torch.Tensor, samplings: Sequence[Sampling], tokens: Sequence[Sequence[int]]
) -> list[int]:
    """The next token of each row, by the engine's own sampling."""
    batch = SamplingBatch.of(
        [_params(each) for each in samplings], [each.seed for each in samplings], logits.device
    )
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for row, own in enumerate(tokens):
        seen[row, list(own)] = samplings[row].repetition_penalty != 1
    positions = torch.tensor([len(own) for own in tokens], device=logits.device)
    chosen: list[int] = batch.choose(logits, positions, seen).tolist()
    return chosen
