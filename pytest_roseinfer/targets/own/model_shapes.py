"""The shapes and traits of the small models that roseinfer's own engine is checked with."""

from __future__ import annotations

from typing import Any

VOCABULARY = 32
END = 5
POSITIONS = 48
ODD = "odd llama"
"""This model has one token more than the others, so its head is padded."""
LONG_POSITIONS = 1300

SLOPED = "sloped bloom"
"""In this one a score loses something for each token between query and key (ALiBi)."""
_Shape = tuple[str, int, int, int]
"""A family, query heads, KV heads and the size of a head."""
_SHORT: dict[str, _Shape] = {
    "gpt2": ("gpt2", 2, 2, 12),
    "llama": ("llama", 4, 2, 6),
    ODD: ("llama", 4, 2, 6),
    "llama 10:2": ("llama", 10, 2, 6),
    "llama 24:3": ("llama", 24, 3, 6),
    "llama 32:2": ("llama", 32, 2, 6),
    SLOPED: ("bloom", 8, 8, 6),  # the more heads, the steeper
    "mixtral": ("mixtral", 4, 2, 6),
}
LONG: dict[str, _Shape] = {
    "gpt2 1x16": ("gpt2", 1, 1, 16),
    "llama 32:2x16": ("llama", 32, 2, 16),
    "qwen3 4:4x16": ("qwen3", 4, 4, 16),
    "gpt2 3x80": ("gpt2", 3, 3, 80),
    "gpt2 12x64": ("gpt2", 12, 12, 64),
    "llama 1:1x32": ("llama", 1, 1, 32),
    "llama 8:1x64": ("llama", 8, 1, 64),
    "llama 10:2x64": ("llama", 10, 2, 64),
    "llama 4:2x256": ("llama", 4, 2, 256),
    "llama 6:3x80": ("llama", 6, 3, 80),
    "qwen3 16:8x128": ("qwen3", 16, 8, 128),
    "qwen3 16:1x64": ("qwen3", 16, 1, 64),
}
HYBRID = "half windowed qwen3"
"""Of this model's two layers one attends to all tokens, and one to the last ``WINDOW``."""
CAPPED = "capped gemma2"
SINKING = "gpt-oss with sinks"
"""In these too every second layer has a window."""
_WINDOWED: dict[str, _Shape] = {
    "windowed mistral": ("mistral", 4, 2, 6),
    HYBRID: ("qwen3", 4, 2, 6),
    CAPPED: ("gemma2", 4, 2, 6),
    SINKING: ("gpt_oss", 4, 2, 6),
}
_FAMILY_TRAITS: dict[str, dict[str, Any]] = {
    # By default its scores are scaled for heads of 256, and so small that a cap does nothing.
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    # Steps of few rows visit fewer experts than there are, and those of more rows some twice.
    "mixtral": {"num_local_experts": 7, "num_experts_per_tok": 2},
}
SMALL = tuple(_SHORT)
WITH_WINDOWS_ALONE = ("windowed mistral", HYBRID)
WINDOWED = tuple(_WINDOWED)
"""Models whose layers, or every second of them, attend to the last ``WINDOW`` tokens."""
WINDOW = 5
_WINDOWS = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
OF_MANY_SHAPES = tuple(LONG)
"""Kernels depend on these shapes: one query head to 16 for each KV head, and heads of 16 to 256.
Models whose kernels compile soonest come first."""


def config(name: str) -> Any:
    """Return the config of a model. Importing transformers takes seconds."""
    from transformers import AutoConfig

    family, heads, kv_heads, head_dim = (_SHORT | _WINDOWED | LONG)[name]
    positions = LONG_POSITIONS if name in LONG else POSITIONS
    tokens = {"vocab_size": VOCABULARY + (name == ODD), "bos_token_id": END, "eos_token_id": END}
    if family == "gpt2":
        sizes = {"n_positions": positions, "n_embd": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    if family == "bloom":
        sizes = {"seq_length": positions, "hidden_size": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    return AutoConfig.for_model(
        family,
        hidden_size=24 if 24 % heads == 0 else 2 * heads,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        **tokens,
        **(_WINDOWS if name in _WINDOWED else {}),
        **_FAMILY_TRAITS.get(family, {}),
    )
