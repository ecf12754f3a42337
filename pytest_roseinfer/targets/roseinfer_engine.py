"""Adapter of roseinfer's engine on small models, with its switches and fast paths."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets import engine_models as models
from pytest_roseinfer.targets import engine_models as shapes
from pytest_roseinfer.targets.engine_models import (
    generate_alone,
    is_near_tie,
    is_unfinished,
    text_of,
    tokenizer,
)
from pytest_roseinfer.targets.roseinfer_manager import held_blocks
from roseinfer import AttentionPath, EnginePath, Guide, RequestTooLarge, SamplingParams
from roseinfer._plugin import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# Fast paths, in the order in which searches aim at them.


_ALONE = "transformers"
"""The slow twin: the model's own attention, without a cache, batches, or roseinfer's code."""
_IN_CHUNKS = {"chunked_prefill": True, "prefill_max_tokens": 3}
_LONGER_THAN_A_WINDOW = 8
_IN_LONG_CHUNKS = {"chunked_prefill": True, "prefill_max_tokens": _LONGER_THAN_A_WINDOW}
_KERNELS = {"paged_attention": True}
_RESIDENT = {"resident_decode": True, "per_layer_kv": False}
_RESIDENT_KERNELS = {**_RESIDENT, **_KERNELS}
_REUSED_AT_ONCE = {**_RESIDENT, "prefix_cache": False, "max_batch_size": 8}
"""Settings that let new sequences reuse freed slots and blocks while others still decode."""
_ONE_BY_ONE = {**_RESIDENT, "prefill_max_batch_size": 1, "max_batch_size": 8}
"""Settings that make sequences start to decode one after the other."""
_REPETITIVE = {"model": shapes.ALIBI}
"""Model whose texts soon repeat themselves, so that most requests get drafts, right and wrong."""
_SPECULATING = {"speculation": "ngram", "resident_decode": False}
_LEAVING_SLOTS = {**_RESIDENT, "speculation": "ngram"}
_PROMPTS_AS_ROWS = {**_REUSED_AT_ONCE, "prompt_rows": 30, "run_ahead": 3}
_HYBRID = {"model": shapes.HYBRID}
_FUSED = {"fused_model": True, "model": "gpt2"}
_JOINED = {"fused_model": None}
_BATCHED_ATTENTION = {"paged_attention": None, "resident_decode": False}
_TWO_AT_ONCE = {**_RESIDENT, **_IN_CHUNKS, "prefix_cache": True, "max_batch_size": 2}
_PACKED = {"prefill_admission_policy": "pack", "prefill_max_tokens": 8, "max_batch_size": 8}


def _with_models(settings: Mapping[str, Any], *names: str) -> list[Mapping[str, Any]]:
    """Return the settings with each of these models, which are few, because searches are short.

    Each search starts with the first of them.
    """
    return [{**settings, "model": name} for name in names]


_AIMS: Mapping[EnginePath, Sequence[Mapping[str, Any]]] = {
    EnginePath.RESIDENT: [
        _RESIDENT,
        _REUSED_AT_ONCE,
        _ONE_BY_ONE,
        _TWO_AT_ONCE,
        # Blocks of each group are taken where all but a few are cached.
        {**_RESIDENT, **_IN_LONG_CHUNKS, "prefix_cache": True, **_HYBRID},
    ],
    EnginePath.RUN_AHEAD: [
        {**_RESIDENT, "run_ahead": 2},
        {**_REUSED_AT_ONCE, "run_ahead": 3},
        {**_REUSED_AT_ONCE, **_IN_LONG_CHUNKS, "run_ahead": 3, "model": shapes.TWO_GROUPS},
    ],
    EnginePath.BATCHED: (),
    EnginePath.MIXED: (),
    EnginePath.CHUNKED: [_IN_CHUNKS],
    EnginePath.ADMITTED_OUT_OF_ORDER: [_PACKED],
    EnginePath.PREFIX_HIT: [{"prefix_cache": True}],
    EnginePath.RECOMPUTED: [{"max_batch_size": 8}],
    EnginePath.FREED_OUT_OF_WINDOW: [
        {"model": name, "per_layer_kv": False, "prefix_cache": kept, "prefill_max_tokens": most}
        for name, kept, most in zip(
            shapes.WINDOWED,
            (True, True, False, False, True),
            (100, _LONGER_THAN_A_WINDOW, 100, _LONGER_THAN_A_WINDOW, _LONGER_THAN_A_WINDOW),
            strict=True,
        )
    ],
    EnginePath.FORKED: (),
    EnginePath.PADDED_LM_HEAD: [{"pad_head": True, "model": shapes.PADDED_VOCABULARY}],
    EnginePath.CUDA_GRAPH: [
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 0, "model": "llama"},
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 2, **_HYBRID},
        {**_RESIDENT_KERNELS, "cuda_graph": True, "run_ahead": 2, **_FUSED},
    ],
    EnginePath.CANCELLED: (),
    EnginePath.DRAFTED: [{**_SPECULATING, **_REPETITIVE}, _LEAVING_SLOTS],
    EnginePath.ACCEPTED: [_SPECULATING, {**_LEAVING_SLOTS, **_REPETITIVE}],
    EnginePath.REJECTED: [_SPECULATING, {**_SPECULATING, **_REPETITIVE, "prefix_cache": True}],
    EnginePath.DRAFT_VERIFICATION: [
        {**_LEAVING_SLOTS, "run_ahead": 3, "model": shapes.SOFTCAP},
        {**_LEAVING_SLOTS, **_REPETITIVE},
        {**_LEAVING_SLOTS, "run_ahead": 3, **_HYBRID},
    ],
    EnginePath.PROMPTS_AS_ROWS: [
        {**_PROMPTS_AS_ROWS, **_IN_LONG_CHUNKS},
        _PROMPTS_AS_ROWS,
        {**_PROMPTS_AS_ROWS, **_HYBRID},
        {**_PROMPTS_AS_ROWS, **_IN_CHUNKS},
    ],
    # Rows for one long prompt of the simplest mix, but not for all prompts together.
    EnginePath.PROMPTS_IN_LAUNCHES: [{**_PROMPTS_AS_ROWS, "prompt_rows": 12}],
    EnginePath.LOGPROBS: [_RESIDENT, {**_REUSED_AT_ONCE, "run_ahead": 3}],
    EnginePath.GUIDED: [_RESIDENT, _REUSED_AT_ONCE],
    EnginePath.PENALTIES: [_RESIDENT, _REUSED_AT_ONCE, _PROMPTS_AS_ROWS],
    EnginePath.FUSED: _with_models(
        {**_RESIDENT_KERNELS, "fused_model": True}, "mixtral", shapes.HYBRID, "gpt2"
    ),
    EnginePath.FUSED_ARGMAX: [
        {**_RESIDENT_KERNELS, "fused_model": True, **_HYBRID},
        *_with_models(_RESIDENT_KERNELS, shapes.SOFTCAP, "windowed mistral"),
    ],
    EnginePath.JOINED: _with_models(_JOINED, "llama 10:2", shapes.TWO_GROUPS),
}
"""Settings of the mixes that aim at each path.

Only ``COMPILED``, ``STREAMING_GEMM``, ``PAIRED_GEMM`` and ``MEGAKERNEL`` are missing. Compiling
takes seconds for each model of each mix, so no switch here enables it;
``tests/models/test_compiling.py`` compares it with its twin. No model here is wide enough for a
step in one kernel: ``tests/kernels/cuda/whole_step`` compares that with several kernels. Streamed
and paired GEMMs have no switch, nor have ``AttentionPath.PREFILL_CUDA`` and
``APPEND_AND_ATTEND_CUDA``, whose contexts or batches are larger than any here:
``tests/kernels/cuda/warpgroups`` compares them with the kernels that they replace."""
_FIRST = (
    EnginePath.RESIDENT,
    EnginePath.PREFIX_HIT,
    EnginePath.RUN_AHEAD,
    EnginePath.PADDED_LM_HEAD,
    EnginePath.JOINED,
)
_OF_KERNELS = 0.25
"""Share of mixes with kernels, which take 15 times as long under Triton's interpreter."""
_SHARES = {
    **dict.fromkeys((EnginePath.RESIDENT, EnginePath.RUN_AHEAD), 3.0),
    **dict.fromkeys((EnginePath.FUSED, EnginePath.FUSED_ARGMAX), _OF_KERNELS),
}


def _with_values(name: str, *values: object, **others: object) -> list[Mapping[str, Any]]:
    """Return a setting for each of these values of a switch."""
    return [{**others, name: value} for value in values]


_DECODES_RESIDENT = [_RESIDENT]
_HAS_PROMPT_ROWS = _with_values("prompt_rows", 5, 12, 30, 64, **_RESIDENT)
_SPECULATES = [{"speculation": "ngram"}]
_RUNS_WITH: Mapping[EnginePath, Sequence[Mapping[str, Any]]] = {
    EnginePath.RESIDENT: _DECODES_RESIDENT,
    EnginePath.RUN_AHEAD: _with_values("run_ahead", 1, 2, 3, **_RESIDENT),
    EnginePath.CHUNKED: [{"chunked_prefill": True}],
    EnginePath.ADMITTED_OUT_OF_ORDER: [{"prefill_admission_policy": "pack"}],
    EnginePath.PREFIX_HIT: [{"prefix_cache": True}],
    EnginePath.FREED_OUT_OF_WINDOW: [{"per_layer_kv": False}],
    EnginePath.PADDED_LM_HEAD: [{"pad_head": True}],
    EnginePath.CUDA_GRAPH: [{**_RESIDENT, "cuda_graph": True}],
    EnginePath.DRAFTED: _SPECULATES,
    EnginePath.ACCEPTED: _SPECULATES,
    EnginePath.REJECTED: _SPECULATES,
    EnginePath.DRAFT_VERIFICATION: [_LEAVING_SLOTS],
    EnginePath.PROMPTS_AS_ROWS: _HAS_PROMPT_ROWS,
    EnginePath.PROMPTS_IN_LAUNCHES: _HAS_PROMPT_ROWS,
    EnginePath.LOGPROBS: _DECODES_RESIDENT,
    EnginePath.GUIDED: _DECODES_RESIDENT,
    EnginePath.PENALTIES: _DECODES_RESIDENT,
    EnginePath.FUSED: [{"fused_model": True}],
    EnginePath.FUSED_ARGMAX: [_RESIDENT_KERNELS],
    EnginePath.JOINED: [_JOINED],
}
"""Settings that each path needs; the others run with any."""


_ONLY_ON = {EnginePath.CUDA_GRAPH: "cuda", EnginePath.JOINED: "cpu"}


def _alone_equals(path: EnginePath) -> FastPath:
    return FastPath(
        _ALONE,
        _RUNS_WITH.get(path, ()),
        device=_ONLY_ON.get(path),
        share=_SHARES.get(path, 1.0),
        aims=_AIMS[path],
    )


PATHS: Mapping[str, FastPath] = {
    # Paths that had most bugs come first, then kernels.
    **{path.value: _alone_equals(path) for path in _FIRST},
    AttentionPath.BATCHED.value: FastPath(
        AttentionPath.REFERENCE.value,
        [_BATCHED_ATTENTION],
        device="cpu",
        aims=_with_models(_BATCHED_ATTENTION, "llama 24:3", *shapes.WITH_WINDOWS_ALONE),
    ),
    EnginePath.FUSED_ARGMAX.value: _alone_equals(EnginePath.FUSED_ARGMAX),  # most of the kernels
    AttentionPath.DECODE_TRITON.value: FastPath(
        AttentionPath.REFERENCE.value,
        [_KERNELS],
        share=_OF_KERNELS,
        aims=_with_models(_KERNELS, "llama 10:2", shapes.SOFTCAP),
    ),
    AttentionPath.APPEND_AND_ATTEND.value: FastPath(
        AttentionPath.RESIDENT_REFERENCE.value,
        [_RESIDENT_KERNELS],
        share=2 * _OF_KERNELS,  # checks both what a step stores and what it reads
        aims=_with_models(_RESIDENT_KERNELS, shapes.ATTENTION_SINKS, "llama 32:2"),
    ),
    AttentionPath.CHUNK_TRITON.value: FastPath(
        AttentionPath.REFERENCE.value,
        [_KERNELS],
        share=_OF_KERNELS,
        aims=_with_models(_KERNELS, shapes.ALIBI, "llama 10:2"),
    ),
    **{path.value: _alone_equals(path) for path in _AIMS},
}


# Switches, and those that change the sizes of allocations.


RUN_AHEAD = (0, 1, 3)
OPTION_CHOICES: Mapping[str, Sequence[Any]] = {
    "model": (
        *("gpt2", "llama", "llama 10:2", "llama 24:3", "llama 32:2", shapes.ALIBI),
        *shapes.WINDOWED,
    ),
    "prefix_cache": (True, False),
    "prefill_admission_policy": ("fifo", "pack"),
    "prefill_max_tokens": (100, 1, 3, 8),
    "prefill_max_batch_size": (8, 1, 2),
    "prompt_rows": (0, 5, 30),
    "max_batch_size": (8, 1, 2, 3, 40),
    "chunked_prefill": (True, False),
    "per_layer_kv": (False, True),
    "resident_decode": (False, True),
    "run_ahead": RUN_AHEAD,
    "speculation": (None, None, "ngram"),
    # Only in searches that aim at them: Triton's interpreter makes a step 100 times as slow.
    "paged_attention": (False,),
    "fused_model": (False,),
    "pad_head": (False,),
    # Only in searches that aim at it: capturing takes seconds.
    "cuda_graph": (False,),
}
SIZES: Mapping[str, Sequence[Any]] = {
    "model": shapes.OF_MANY_SHAPES,
    "max_batch_size": (8, 1, 17, 3, 64, 128),
    "prefill_max_tokens": (2048, 16, 100, 333),
    "prefill_max_batch_size": (16, 1, 128),
    "prompt_rows": (0, 64),
    "run_ahead": RUN_AHEAD,
    "speculation": (None, "ngram"),
    "resident_decode": (True, True, False),
    "cuda_graph": (False, True),
    "paged_attention": (True, True, False),
    "fused_model": (True, False),
    "pad_head": (True, False),
    "prefix_cache": (True, False),
    "chunked_prefill": (True, False),
}


# Forks: one prompt, stored once and continued in several ways.


def params(sampling: Sampling) -> SamplingParams:
    guide = None if sampling.guide is None else Guide(grammar=sampling.guide)
    return SamplingParams(**{**asdict(sampling), "guide": guide})


# Guides: the allowed tokens at each place of a completion, as in "6-9 12-20".
#
# They need no tokenizer and no grammar; ``tests/guided`` tests those. A matcher here stands in for
# the compiled one of the same guide.


GUIDES = (
    "7-12",
    "20-31 1-4 8-19 20-31",
    "7-19 8-31 1-4 7-12 20-31 8-19 1-4 8-31 7-12",
    " ".join(["8-19"] * 20),
)
"""Guides of one place, of a few, and of more than a request may have tokens."""


class PlaceMatcher:
    """State of one completion in a guide: the number of its tokens."""

    may_end = has_failed = False
    failure = "every place has tokens"

    def __init__(self, guide: str) -> None:
        self._places = [_token_range(place) for place in guide.split()]
        self._at = 0

    @property
    def allowed(self) -> range:
        return self._places[self._at] if self._at < len(self._places) else range(0)

    def fill_bitmask(self, row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens allowed next, in words of 32, and clear all others."""
        row[:] = 0
        for token in self.allowed:
            row[token // 32] |= np.uint32(1 << token % 32)

    def accept_token(self, token: int) -> bool:  # noqa: ARG002
        """Advance by a token, and return True if none may follow it."""
        self._at += 1
        return not self.allowed


def _token_range(place: str) -> range:
    first, last = map(int, place.split("-"))
    return range(first, last + 1)


def fork(runner: Any, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Return the tokens of each fork of the prompt's sequence; all decode together."""
    (first,), logits = runner.prefill([list(prompt)])
    forks = [first, *(runner.fork(first) for _ in samplings[1:])]
    logits = logits.expand(len(forks), -1)
    running = list(zip(forks, samplings, strict=True))
    while running:
        texts = [fork.token_ids for fork, _ in running]
        chosen = _choose(logits, [sampling for _, sampling in running], texts, len(prompt))
        for (fork, _), token in zip(running, chosen, strict=True):
            fork.token_ids.append(token)
        running = [
            (fork, sampling)
            for fork, sampling in running
            if is_unfinished(fork.token_ids, len(prompt), sampling)
        ]
        if running:
            logits = runner.extend([fork for fork, _ in running])
    outputs = [fork.token_ids[len(prompt) :] for fork in forks]
    for fork in forks:
        runner.release(fork)
    return outputs


def _choose(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    tokens: Sequence[Sequence[int]],
    prompted: int,
) -> list[int]:
    """Sample the next token of each fork by the engine's fork_tokens code."""
    seeds = [each.seed for each in samplings]
    tally = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    for row, fork_tokens in enumerate(tokens):
        tally[row, list(fork_tokens[:prompted])] = 1 << 30
        for token in fork_tokens[prompted:]:
            tally[row, token] += 1
    positions = torch.tensor([len(fork_tokens) for fork_tokens in tokens], device=logits.device)
    batch = SamplingBatch.of([*map(params, samplings)], seeds, logits.device)
    chosen: list[int] = batch.sample_tokens(logits, positions, tally).tolist()
    return chosen


_WINDOW_EDGE = "window_edge_in_chunk"
"""Condition: a later chunk of a prompt was longer than its model's window."""
_cached_network = lru_cache(maxsize=16)(models.network)


class RoseinferEngine(EngineAdapter):
    """Adapter of ``LLM``, driven step by step on a cache full of NaN."""

    vocabulary = shapes.VOCABULARY
    max_tokens = shapes.MAX_TOKENS
    extra_steps = max(RUN_AHEAD)
    never_idles = True
    eos_token = shapes.EOS_TOKEN
    other_eos_tokens = (shapes.SECOND_EOS_TOKEN,)
    fast_interpreter = True
    sampling = SamplingTraits(min_p=True, presence_and_frequency=True, max_seed=2**63 - 1)
    prefix_reuse = PrefixReuseTraits(
        finds="full blocks",
        evicts="least recent",
        # With windows, a prefix also needs the blocks of its last tokens' windows.
        evicts_from_end={"model": shapes.SMALL},
        enabled_by={"prefix_cache": True},
    )
    paths = PATHS
    long_contexts: ClassVar[Mapping[str, int]] = {
        path.value: shapes.PART_TOKENS
        for path in (
            AttentionPath.CHUNK_TRITON,
            AttentionPath.DECODE_TRITON,
            AttentionPath.APPEND_AND_ATTEND,
        )
    }
    guides = GUIDES
    conditions: ClassVar[Sequence[str]] = (
        "ended_by_flushed_stop_string",
        "ended_by_guide_at_first_token",
        _WINDOW_EDGE,
    )
    option_choices = OPTION_CHOICES
    large_mix_tokens = shapes.LONG_POSITIONS
    sizes = SIZES

    def make(self, mix: RequestMix) -> None:
        from roseinfer import LLM  # imports transformers, which takes seconds

        models.compute_logits_of(mix)
        options = dict(mix.options)
        options["resident_decode"] &= not options["per_layer_kv"]
        model = options.pop("model")
        self._tokenizer = tokenizer(byte_level="gpt2" in model)
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._window_edges = 0
        self._requests: list[Any] = []
        """Requests of a model with windows."""
        self._has_windows = model in shapes.WINDOWED
        self.llm = LLM(
            _cached_network(model, mix.device),
            tokenizer=self._tokenizer,
            device=mix.device,
            block_size=mix.block_size,
            kv_cache_tokens=mix.cache_tokens,
            **options,
        )
        self.engine = self.llm.engine
        kv = self.engine.sequence_runner.kv
        for cache in (kv.keys, kv.values):
            cache.fill_(float("nan"))

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        matcher: Any = None if sampling.guide is None else PlaceMatcher(sampling.guide)
        request = self.engine.submit(prompt, params(sampling), guide=matcher)
        self._requests += [request] * self._has_windows
        return request

    def cancel(self, request: Any) -> None:
        self.engine.cancel(request)

    def pause(self, request: Any) -> None:
        self.engine.pause(request)

    def resume(self, request: Any) -> None:
        self.engine.resume(request)

    def refusals(
        self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
    ) -> tuple[type[Exception], ...]:
        name = mix.options["model"]
        positions = shapes.LONG_POSITIONS if name in shapes.LONG else shapes.POSITIONS
        new = min(sampling.max_new_tokens, positions - len(prompt))
        blocks = -(-(len(prompt) + new - 1) // mix.block_size)
        # Layers with windows do not hold all blocks at a time.
        fits = name in shapes.WINDOWED or blocks <= -(-mix.cache_tokens // mix.block_size)
        return () if new > 0 and fits else (RequestTooLarge,)

    def step(self) -> None:
        before = [(each.sequence.num_stored, each.times_preempted) for each in self._requests]
        for update in self.engine.step():
            self._texts[update.request.id].append(update.text)
        for request, (begin, starts) in zip(self._requests, before, strict=True):
            is_later = begin > 0 and request.times_preempted == starts
            self._window_edges += is_later and request.sequence.num_stored > begin + shapes.WINDOW

    def tokens(self, request: Any) -> list[int]:
        return list(request.token_ids)

    def is_finished(self, request: Any) -> bool:
        return request.finish_reason is not None

    def finish_reason(self, request: Any) -> str:
        return str(request.finish_reason)

    def find_leaks(self) -> str:
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        return held_blocks(self.engine.sequence_runner.kv)

    def path_counts(self) -> Mapping[str, int]:
        counts = {str(name): count for name, count in self.engine.path_counts.items()}
        return {**counts, _WINDOW_EDGE: self._window_edges}

    def generate_alone(
        self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
    ) -> list[int]:
        return list(generate_alone(mix.options["model"], mix.device, tuple(prompt), sampling))

    def allowed_tokens(self, guide: str, tokens: Sequence[int]) -> Sequence[int]:
        places = guide.split()
        return [*_token_range(places[len(tokens)])] if len(tokens) < len(places) else []

    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        return fork(self.engine.sequence_runner, prompt, samplings)

    def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        return is_near_tie(mix, tuple(tokens), sampling, self.rounding)

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Sequence[float]:
        return [*map(float, models.logits(mix.options["model"], mix.device, tuple(tokens)))]

    def logprobs(self, request: Any) -> Any:
        return request.logprobs

    def top_logprobs(self, request: Any) -> Any:
        return request.top_logprobs

    def prompt_logprobs(self, request: Any) -> Any:
        return request.prompt_logprobs

    def pieces(self, request: Any) -> Sequence[str]:
        return self._texts[request.id]

    def decode(self, tokens: Sequence[int]) -> str:
        return text_of(tokens, self._tokenizer)

    def stage(self, request: Any) -> str:
        if not (request.sequence.num_stored or request.num_in_flight):
            return "preempted" if request.times_preempted else "waiting"
        return "decoding" if request.num_unstored == 1 else "prefilling"

    def cached_tokens(self, request: Any) -> int:
        return int(request.num_cached_tokens)
