"""What one layer of a model asks of its attention, beside the plain softmax over all before."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

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
