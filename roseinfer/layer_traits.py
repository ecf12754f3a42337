"""What one layer of a model asks of its attention, beside the plain softmax over all before."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerTraits:
    """Found when a model is loaded; a trait that is None was not asked for.

    A score becomes ``scale * query.key``, then ``cap * tanh(score / cap)``, and then
    ``slope * distance`` is taken off.
    """

    scale: float
    """Products of queries and keys are multiplied by it."""
    window: int | None = None
    """A token sees so many tokens, itself included."""
    cap: float | None = None
    """No score leaves the range from ``-cap`` to ``cap``."""
    sinks: Tensor | None = None
    """A score for each query head that takes its part of the weights, and has no value."""
    slopes: Tensor | None = None
    """For each query head, what a score loses for each token between query and key (ALiBi)."""

    @property
    def asked_for(self) -> frozenset[str]:
        """The names of the traits that the layer has."""
        return frozenset(name for name in ALL_TRAITS if getattr(self, name) is not None)


ALL_TRAITS = frozenset(field.name for field in fields(LayerTraits))


# What a layer makes of queries and keys before it attends: it norms and rotates them.


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Heads are normed, if there are gains, and each is rotated by its token's position.

    Its first half turns against its second. Where cosines are narrower than a head, what lies
    behind them stays as it is.
    """

    cosines: Tensor
    """``[positions, rotated]``, in the model's dtype; the halves of a row are the same."""
    sines: Tensor
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    epsilon: float = 0.0
    together: bool = False
    """True where all heads of a token are one row to the norm, and its gain is as long."""

    def of_queries(self, query: Tensor, positions: Tensor) -> Tensor:
        """Return ``[tokens, heads, head_dim]`` as the layer attends with it."""
        return self._of(query, positions, self.query_gain)

    def of_keys(self, key: Tensor, positions: Tensor) -> Tensor:
        """Return ``[tokens, kv_heads, head_dim]`` as the layer stores it."""
        return self._of(key, positions, self.key_gain)

    def _of(self, heads: Tensor, positions: Tensor, gain: Tensor | None) -> Tensor:
        x = heads.float() if gain is None else self._normed(heads, gain).float()
        width = self.cosines.shape[1]
        cosines, sines = (table[positions][:, None].float() for table in (self.cosines, self.sines))
        turning, rest = x[..., :width], x[..., width:]
        first, second = turning.chunk(2, dim=-1)
        turned = turning * cosines + torch.cat((-second, first), -1) * sines
        return torch.cat((turned, rest), -1).to(heads.dtype)

    def _normed(self, heads: Tensor, gain: Tensor) -> Tensor:
        """Norm heads, rounded where the model's own modules round."""
        x = heads.flatten(1).float() if self.together else heads.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        x = x * gain if self.together else x.to(heads.dtype) * gain
        return x.to(heads.dtype).view_as(heads)
