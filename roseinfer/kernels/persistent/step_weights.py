"""The weights that the kernel of a whole step reads, where they lie."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.rotation import Rotation


@dataclass(frozen=True, slots=True)
class StepLayer:
    """The weights of a layer, ``[outputs, inputs]`` each."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    norm_of_mlp: Tensor
    gates_and_ups: Tensor
    down: Tensor
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights of a model."""

    layers: Sequence[StepLayer]
    words: Tensor
    head: Tensor
    norm: Tensor
    """Behind the last layer."""
    epsilon: float
    embedding_times: float
    added_times: float
    scale: float
    """It makes powers of two of the products of queries and keys."""

    def rotations(self) -> list[Rotation]:
        """Return those of the layers that rotate."""
        return [layer.rotation for layer in self.layers if layer.rotation is not None]

    def head_epsilon(self) -> float:
        """Return the epsilon of the norms of heads."""
        return max((rotation.epsilon for rotation in self.rotations()), default=0.0)

    def tensors(self) -> list[Tensor]:
        """Return all that the kernel reads, as it is stored."""
        parts: list[StepLayer | Rotation] = [*self.layers, *self.rotations()]
        found = [getattr(part, field.name) for part in parts for field in fields(part)]
        held = [each for each in found if isinstance(each, torch.Tensor)]
        return [self.words, self.head, self.norm, *held]
