"""The engine's fast paths, in the order in which searches aim at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.targets.own import model_shapes as shapes
from roseinfer import AttentionPath, EnginePath

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ALONE = "transformers"
"""The slow twin: a model's own attention, without a cache, batches, or any code of ours."""
_IN_CHUNKS = {"chunked_prefill": True, "prefill_max_tokens": 3}
_KERNELS = {"paged_attention": True}
_RESIDENT = {"resident_decode": True, "per_layer_kv": False}
_RESIDENT_KERNELS = {**_RESIDENT, **_KERNELS}
_REUSED_AT_ONCE = {**_RESIDENT, "prefix_cache": False, "max_batch_size": 8}
"""A new sequence takes what another one gave up while others still decode beside it."""
_ONE_BY_ONE = {**_RESIDENT, "prefill_max_batch_size": 1, "max_batch_size": 8}
"""Sequences begin to decode one after another, and none ends in between."""
_SPECULATING = {"speculation": "ngram", "resident_decode": False}
_LEAVING_SLOTS = {**_RESIDENT, "speculation": "ngram"}
_IN_ROWS = {**_REUSED_AT_ONCE, "prompt_rows": 30, "run_ahead": 3}
_HYBRID = {"model": shapes.HYBRID}
_FUSED = {"fused_model": True, "model": "gpt2"}
_TWO_AT_ONCE = {**_RESIDENT, **_IN_CHUNKS, "prefix_cache": True, "max_batch_size": 2}
_PACKED = {"prefill_admission_policy": "pack", "prefill_max_tokens": 8, "max_batch_size": 8}


def _with_models(settings: Mapping[str, Any], *names: str) -> list[Mapping[str, Any]]:
    """Return the settings with each of these models; a search is short, so they are few.

    Every search begins with the first of them.
    """
    return [{**settings, "model": name} for name in names]


_RUNS_WITH: Mapping[EnginePath, Sequence[Mapping[str, Any]]] = {
    EnginePath.RESIDENT: [_RESIDENT, _REUSED_AT_ONCE, _ONE_BY_ONE, _TWO_AT_ONCE],
    EnginePath.RUN_AHEAD: [{**_RESIDENT, "run_ahead": 2}, {**_REUSED_AT_ONCE, "run_ahead": 3}],
    EnginePath.BATCHED: (),
    EnginePath.MIXED: (),
    EnginePath.CHUNKED: [_IN_CHUNKS],
    EnginePath.OVERTAKEN: [_PACKED],
    EnginePath.PREFIX_HIT: [{"prefix_cache": True}],
    EnginePath.RESUMED: [{"max_batch_size": 8}],
    EnginePath.GAVE_BACK: [
        {"model": name, "per_layer_kv": False, "prefix_cache": kept}
        for name, kept in zip(shapes.WINDOWED, (True, True, False, False), strict=True)
    ],
    EnginePath.FORKED: (),
    EnginePath.PADDED_HEAD: [{"pad_head": True, "model": shapes.ODD}],
    EnginePath.GRAPH: [
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 0, "model": "llama"},
        {**_RESIDENT, "cuda_graph": True, "run_ahead": 2, **_HYBRID},
        {**_RESIDENT_KERNELS, "cuda_graph": True, "run_ahead": 2, **_FUSED},
    ],
    EnginePath.CANCELLED: (),
    EnginePath.DRAFTED: [_SPECULATING, _LEAVING_SLOTS],
    EnginePath.ACCEPTED: [_SPECULATING, _LEAVING_SLOTS],
    EnginePath.REJECTED: [_SPECULATING, {**_SPECULATING, "prefix_cache": True}],
    EnginePath.VERIFIED: [_LEAVING_SLOTS, {**_LEAVING_SLOTS, "run_ahead": 3, **_HYBRID}],
    EnginePath.IN_ROWS: [_IN_ROWS, {**_IN_ROWS, **_HYBRID}],
    EnginePath.TOLD: [_RESIDENT, {**_REUSED_AT_ONCE, "run_ahead": 3}],
    EnginePath.PENALISED: [_RESIDENT, _REUSED_AT_ONCE, {**_RESIDENT, "run_ahead": 3}],
    EnginePath.FUSED: _with_models(
        {**_RESIDENT_KERNELS, "fused_model": True}, "mixtral", shapes.HYBRID, "gpt2"
    ),
    EnginePath.LIKELIEST: _with_models(_RESIDENT_KERNELS, shapes.CAPPED, "windowed mistral"),
}
"""Only ``COMPILED``, ``GUIDED``, ``STREAMED``, ``PAIRED`` and ``WHOLE_STEP`` are missing. To
compile takes seconds for every model of every mix, so no switch here asks for it, and
``tests/engine/test_compiling.py`` compares it with its twin. No request here has a guide:
``tests/guided`` holds those to what they get alone. No model here is as wide as a step in one
kernel needs it: ``tests/persistent`` compares that with several kernels. What is streamed or
paired has no switch, nor have ``AttentionPath.PROMPTS`` and ``ROWS``, whose contexts or batches
are larger than any here: ``tests/warpgroups`` compares them with the kernels that they replace."""
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


PATHS: Mapping[str, FastPath] = {
    # Where most bugs were comes first, and then kernels.
    **{path.value: _alone_equals(path) for path in _FIRST},
    AttentionPath.DECODE_TRITON.value: FastPath(
        AttentionPath.REFERENCE.value,
        _with_models(_KERNELS, "llama 10:2", shapes.CAPPED),
        share=_OF_KERNELS,
    ),
    AttentionPath.APPEND_AND_ATTEND.value: FastPath(
        AttentionPath.SLOTS_REFERENCE.value,
        _with_models(_RESIDENT_KERNELS, shapes.SINKING, "llama 32:2"),
        share=2 * _OF_KERNELS,  # what a step stores and what it sees are looked for here
    ),
    AttentionPath.CHUNK_TRITON.value: FastPath(
        AttentionPath.REFERENCE.value,
        _with_models(_KERNELS, shapes.SLOPED, "llama 10:2"),
        share=_OF_KERNELS,
    ),
    **{path.value: _alone_equals(path) for path in _RUNS_WITH},
    EnginePath.GRAPH.value: FastPath(_ALONE, _RUNS_WITH[EnginePath.GRAPH], device="cuda"),
}
