"""The sizes of a model that the cache and the engine need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, RequestTooLarge, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that its cache and its requests depend on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    """Positions that the engine may use."""

    def check_tokens(self, prompt: Sequence[int]) -> None:
        """Raise for a prompt that the model cannot read."""
        if not prompt:
            raise BadArgument("an empty prompt: at least one token is needed")
        if len(prompt) > self.max_length:
            raise RequestTooLarge(
                f"a prompt of {len(prompt)} tokens for a model of {self.max_length} positions"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise BadArgument(f"token ids must lie in 0..{self.vocab_size - 1}")


_DEFAULT_MAX_LENGTH = 2048
"""Positions of a model whose config has no limit, since it could have any number: Bloom."""


def read_model_shape(text: Any, name: str, max_length: int | None) -> ModelShape:
    """Return the shape by a model's text config, with at most ``max_length`` positions."""
    heads = text.num_attention_heads
    made_for = _max_positions(text) or max_length or _DEFAULT_MAX_LENGTH
    if max_length is not None and max_length > made_for:
        raise UnsupportedModel(f"max_length={max_length}: {name} has {made_for} positions")
    if min(text.num_hidden_layers, heads, text.vocab_size, made_for) < 1:
        raise UnsupportedModel(
            f"{name} has {text.num_hidden_layers} layers, {heads} heads, {text.vocab_size} tokens "
            f"and {made_for} positions: each must be at least 1"
        )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=_num_kv_heads(text, heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_length=max_length or made_for,
    )


def _max_positions(text: Any) -> int | None:
    """Return the positions a model was made for, by any name in its config; None without one."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    positions = [
        int(getattr(text, name)) for name in names if getattr(text, name, None) is not None
    ]
    return positions[0] if positions else None


def _num_kv_heads(text: Any, heads: int) -> int:
    """Return the number of KV heads."""
    kv_heads: int | None = getattr(text, "num_key_value_heads", None)
    if kv_heads is None and hasattr(text, "new_decoder_architecture"):  # Falcon's, of several kinds
        all_share_one = text.multi_query and not text.new_decoder_architecture
        kv_heads = 1 if all_share_one else text.num_kv_heads
    return kv_heads or heads
