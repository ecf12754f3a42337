"""Tries a model's fused kernels on a few tokens when it is loaded: its own modules must agree.

Who wraps a module, with an adapter or a quantised weight, changes what it computes. Fused kernels
read the weights that it had.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, StepBatch
from roseinfer.attention.reference import attend
from roseinfer.models.trial import alike, trial_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.layer_traits import LayerTraits
    from roseinfer.models.causal import CausalModel


class _OneText(AttentionBackend):
    """Attends to one text, all of whose tokens are in the step, and keeps nothing."""

    def __init__(self, traits: Sequence[LayerTraits]) -> None:
        self.traits = traits
        self.path_counts = Counter()

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: no batch says more than the tokens do."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        return attend(query, keys, values, self.traits[layer]).contiguous()


@torch.inference_mode()
def agrees_with_its_modules(fused: CausalModel) -> bool:
    """Return True if the fused kernels compute what the model's own modules do, but for rounding.

    The last of the tokens are as far on as a text can come.
    """
    tokens = torch.tensor(trial_tokens(fused.config, fused.shape), device=fused.device)
    positions = torch.arange(len(tokens), device=fused.device)
    positions[len(tokens) // 2 :] += fused.shape.max_length - len(tokens)
    attention = _OneText(fused.traits)
    return alike(*fused.logits_in_two_ways(tokens, positions, attention))
