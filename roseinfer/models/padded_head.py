"""A language-model head that is wider than its vocabulary, where that makes it faster."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, pad

_WIDTH = 64
"""The outputs of a padded head are a multiple of this."""
_NEEDED = 8
"""8 outputs of two bytes are 16 bytes. Where rows of logits do not begin at a multiple of that,
matrix products fall back to kernels several times slower."""


class PaddedHead(torch.nn.Module):
    """Computes more outputs than the model has tokens, and returns those that it has."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self._outputs = head.out_features
        more = -self._outputs % _WIDTH
        self._weight = pad(head.weight.detach(), (0, 0, 0, more))
        self._bias = None if head.bias is None else pad(head.bias.detach(), (0, more))
        # An embedding that is tied to the head stays in the same memory.
        head.weight.data = self._weight[: self._outputs]

    @property
    def weight(self) -> torch.Tensor:
        """Weight without the padding, as fused kernels take it."""
        return self._weight[: self._outputs]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)[..., : self._outputs]


def pad_head(model: Any) -> None:
    """Give a transformers model a padded head if its vocabulary is of an odd size."""
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.out_features % _NEEDED:
        model.set_output_embeddings(PaddedHead(head))
