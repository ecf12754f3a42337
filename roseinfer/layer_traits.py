"""Attention traits of a layer (scale, window, softcap, sinks, ALiBi) and its rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerTraits:
    """Traits of one layer's attention, read when a model is loaded; None for an absent trait.

    A score is ``scale * query.key``, then ``cap * tanh(score / cap)``, minus ``slope * distance``.
    """

    scale: float
    """Factor of the dot products of queries and keys."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""
    softcap: float | None = None
    """Softcap: scores stay between ``-cap`` and ``cap``."""
    sinks: Tensor | None = None
    """Score per query head that takes part in the softmax and has no value (attention sink)."""
    slopes: Tensor | None = None
    """Slope per query head, subtracted from scores per token of distance (ALiBi)."""

    @property
    def trait_names(self) -> frozenset[str]:
        """Names of the traits that the layer has."""
        return frozenset(name for name in ALL_TRAITS if getattr(self, name) is not None)


ALL_TRAITS = frozenset(field.name for field in fields(LayerTraits))


# Normalization and rotation of queries and keys before attention.


@dataclass(frozen=True, slots=True, eq=False)
class RotaryEmbedding:
    """Rotary position embedding, after an optional RMS norm of queries and keys.

    The first half of a head's rotated elements is paired with the second. Where cosines are
    narrower than a head, the remaining elements are not rotated.
    """

    cosines: Tensor
    """Cosines ``[positions, rotated]``, in the model's dtype; both halves of a row are equal."""
    sines: Tensor
    query_norm_weight: Tensor | None = None
    """Weights of the norm of queries; None for no norm."""
    key_norm_weight: Tensor | None = None
    epsilon: float = 0.0
    norm_across_heads: bool = False
    """True if the norm, and so its weight, spans all heads of a token, not one head."""

    def apply_to_queries(self, query: Tensor, positions: Tensor) -> Tensor:
        """Normalize and rotate queries, ``[tokens, heads, head_dim]``."""
        return self._norm_and_rotate(query, positions, self.query_norm_weight)

    def apply_to_keys(self, key: Tensor, positions: Tensor) -> Tensor:
        """Normalize and rotate keys, ``[tokens, kv_heads, head_dim]``, as the layer stores them."""
        return self._norm_and_rotate(key, positions, self.key_norm_weight)

    def _norm_and_rotate(self, heads: Tensor, positions: Tensor, gain: Tensor | None) -> Tensor:
        x = heads.float() if gain is None else self._normalize(heads, gain).float()
        width = self.cosines.shape[1]
        cosines, sines = (table[positions][:, None].float() for table in (self.cosines, self.sines))
        rotary, rest = x[..., :width], x[..., width:]
        first, second = rotary.chunk(2, dim=-1)
        rotated = rotary * cosines + torch.cat((-second, first), -1) * sines
        return torch.cat((rotated, rest), -1).to(heads.dtype)

    def _normalize(self, heads: Tensor, gain: Tensor) -> Tensor:
        """Apply RMS norm to heads, rounding where the model's own modules round."""
        x = heads.flatten(1).float() if self.norm_across_heads else heads.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        x = x * gain if self.norm_across_heads else x.to(heads.dtype) * gain
        return x.to(heads.dtype).view_as(heads)
