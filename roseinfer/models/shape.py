"""The sizes of a model, as the cache and the engine need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roseinfer.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    """Positions the engine may use."""


def shape_of(text: Any, max_length: int | None) -> ModelShape:
    """Return the shape by a model's text config, with at most ``max_length`` positions."""
    heads = text.num_attention_heads
    made_for = int(text.max_position_embeddings)
    if max_length is not None and max_length > made_for:
        raise UnsupportedModel(f"max_length={max_length}: the model has {made_for} positions")
    if min(text.num_hidden_layers, heads, text.vocab_size, made_for) < 1:
        raise UnsupportedModel(
            f"a model of {text.num_hidden_layers} layers, {heads} heads, {text.vocab_size} tokens "
            f"and {made_for} positions: each must be at least 1"
        )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_length=max_length or made_for,
    )
