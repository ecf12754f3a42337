"""Variants of well-known families in use: windows, caps, rotations, heads, dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sweep.subject import Subject
from tests.sweep.tiny_sizes import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORT = 16
"""Longest text with longrope's factors for short texts, in tokens."""
_SCALED = {"factor": 2.0, "rope_theta": 10000.0}
_MADE_FOR = {"original_max_position_embeddings": 32}
_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": _SCALED,
    "dynamic": _SCALED,
    "yarn": _SCALED | _MADE_FOR,
    "llama3": _SCALED | _MADE_FOR | _BANDS,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": _SHORT,
    "short_factor": [1.0, 1.05, 1.1, 1.15],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
_PARTS = {"stablelm": {"partial_rotary_factor": 0.5}}
"""Larger than the default quarter: two elements of a tiny head are too few for dynamic rotation."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def every_variant() -> list[Subject]:
    """Return all variants, sorted by class."""
    variants = [*_rotations(), *_windows(), *_scores(), *_heads(), *_others(), *_dtypes()]
    return sorted(variants, key=lambda subject: subject.model_class)


def _rotations() -> Iterator[Subject]:
    for kind in ("llama", "mistral", "qwen3", "granite", "olmo2", "starcoder2", "stablelm"):
        for rotation, parameters in _ROTATIONS.items():
            scaled = {"rope_type": rotation, **parameters, **_PARTS.get(kind, {})}
            yield Subject(kind, f"{rotation} rotation", {"rope_parameters": scaled})
    for kind in ("llama", "qwen3", "phi3"):
        longrope: dict[str, Any] = {"rope_parameters": _LONGROPE}
        if kind == "phi3":
            longrope["original_max_position_embeddings"] = _SHORT
        yield Subject(kind, "longrope", longrope)
        yield Subject(kind, f"longrope, max_length={_SHORT}", longrope, max_length=_SHORT)
    scales = _LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3}
    for most in (None, _SHORT):
        words = f", max_length={most}" if most else ""
        yield Subject("phimoe", f"longrope{words}", {"rope_parameters": scales}, most)


def _windows() -> Iterator[Subject]:
    window: dict[str, Any] = {"sliding_window": WINDOW}
    for kind in ("mistral", "mixtral", "phi3", "starcoder2", "phimoe"):
        yield from _windowed(kind, "a window", window)
    for kind in ("gemma2", "gemma3_text", "cohere2", "olmo3", "gpt_oss", "exaone4", "ministral"):
        for words, types in (
            ("a window in every layer", [_SLIDING, _SLIDING]),
            ("a window in the second layer", [_FULL, _SLIDING]),
            ("no window", [_FULL, _FULL]),
        ):
            yield from _windowed(kind, words, {**window, "layer_types": types})
    enabled = {**window, "use_sliding_window": True}
    for kind in ("qwen2", "qwen3", "qwen2_moe", "smollm3"):
        yield from _windowed(
            kind, "a window in the second layer", {**enabled, "layer_types": [_FULL, _SLIDING]}
        )
    yield from _windowed("qwen3_moe", "a window", enabled)
    for chunk in (WINDOW, 64):
        yield Subject("llama4_text", f"chunks of {chunk}", {"attention_chunk_size": chunk})
    short = {"attention_chunk_size": WINDOW, "attn_temperature_tuning": False}
    yield Subject("llama4_text", "chunks of 8 and no temperatures", short)
    yield Subject("llama4_text", "one chunk and no temperatures", short, max_length=WINDOW)


def _windowed(kind: str, words: str, changes: dict[str, Any]) -> Iterator[Subject]:
    yield Subject(kind, words, changes)
    if _SLIDING in changes.get("layer_types", [_SLIDING]):
        yield Subject(kind, f"{words}, max_length={WINDOW}", changes, max_length=WINDOW)


def _scores() -> Iterator[Subject]:
    for kind in ("gemma2", "vaultgemma"):
        yield Subject(kind, "scores capped at 5", {"attn_logit_softcapping": 5.0})
        no_cap = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        yield Subject(kind, "nothing capped", no_cap)
    yield Subject("gemma3_text", "sees later tokens", {"use_bidirectional_attention": True})
    yield Subject("gpt2", "scores by layer", {"scale_attn_by_inverse_layer_idx": True})
    yield Subject("gpt2", "unscaled scores", {"scale_attn_weights": False})
    yield Subject("gpt2", "reordered attention", {"reorder_and_upcast_attn": True})
    yield Subject("gpt2", "cross attention", {"add_cross_attention": True})
    for alibi in (True, False):
        words = "ALiBi" if alibi else "rotations"
        yield Subject("falcon", words, {"alibi": alibi})
    for parallel in (True, False):
        words = f"{'parallel' if parallel else 'sequential'} blocks"
        yield Subject("gpt_neox", words, {"use_parallel_residual": parallel})
        yield Subject("stablelm", words, {"use_parallel_residual": parallel})
    yield Subject("stablelm", "norms of queries and keys", {"qk_layernorm": True})
    yield Subject("olmo", "clipped keys", {"clip_qkv": 2.0})


def _heads() -> Iterator[Subject]:
    for kind in ("llama", "qwen2", "phi3", "gemma2", "stablelm"):
        for heads, words in ((1, "one head"), (2, "two heads"), (4, "four heads")):
            yield Subject(kind, f"{words} of keys", {"num_key_value_heads": heads})
    for kind in ("falcon", "gpt_bigcode"):
        for multi in (True, False):
            words = "one head" if multi else "four heads"
            yield Subject(kind, f"{words} of keys", {"multi_query": multi})
    two = {"new_decoder_architecture": True, "num_kv_heads": 2}
    yield Subject("falcon", "two heads of keys", two)
    for kind in ("llama", "qwen2", "gpt2", "opt", "gpt_neox", "mpt", "bloom", "falcon"):
        for tied in (True, False):
            words = "the embedding's" if tied else "weights of its own"
            yield Subject(kind, f"a head with {words}", {"tie_word_embeddings": tied})


def _others() -> Iterator[Subject]:
    for kind in ("llama", "gpt2", "mistral"):
        yield Subject(kind, "max_length=20", max_length=20)
    for kind in ("llama", "phi", "gpt_neox", "stablelm"):
        rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        yield Subject(kind, "half of each head rotated", {"rope_parameters": rotation})
    attention = {"layer_types": ["attention", "attention"]}
    yield Subject("granitemoehybrid", "attention in every layer", attention)
    full = {"layer_types": [_FULL, _FULL]}
    yield Subject("lfm2", "attention in every layer", full)
    yield Subject("qwen3_next", "attention in every layer", full)


def _dtypes() -> Iterator[Subject]:
    for kind in (
        "llama",
        "gpt2",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gpt_oss",
        "olmo2",
    ):
        for dtype in ("bfloat16", "float16"):
            yield Subject(kind, dtype, dtype=dtype)
