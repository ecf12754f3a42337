"""The sizes of a model, as the cache and the engine need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument, RequestTooLarge, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    """Positions the engine may use."""

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


_UNSAID = 2048
"""Positions of a model that says nothing of them, since it could have any number: Bloom."""


def shape_of(text: Any, name: str, max_length: int | None) -> ModelShape:
    """Return the shape by a model's text config, with at most ``max_length`` positions."""
    heads = text.num_attention_heads
    made_for = _positions(text) or max_length or _UNSAID
    if max_length is not None and max_length > made_for:
        raise UnsupportedModel(f"max_length={max_length}: {name} has {made_for} positions")
    if min(text.num_hidden_layers, heads, text.vocab_size, made_for) < 1:
        raise UnsupportedModel(
            f"{name} has {text.num_hidden_layers} layers, {heads} heads, {text.vocab_size} tokens "
            f"and {made_for} positions: each must be at least 1"
        )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        num_kv_heads=_kv_heads(text, heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_length=max_length or made_for,
    )


def _positions(text: Any) -> int | None:
    """Return how many positions a model was made for, if its config says so by any name."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    said = [int(getattr(text, name)) for name in names if getattr(text, name, None) is not None]
    return said[0] if said else None


def _kv_heads(text: Any, heads: int) -> int:
    """Return how many heads of keys and values there are."""
    said: int | None = getattr(text, "num_key_value_heads", None)
    if said is None and hasattr(text, "new_decoder_architecture"):  # Falcon's, of several kinds
        all_share_one = text.multi_query and not text.new_decoder_architecture
        said = 1 if all_share_one else text.num_kv_heads
    return said or heads
