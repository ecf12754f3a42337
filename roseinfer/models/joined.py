"""Linear layers whose weights lie in one tensor, so that one product computes all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def join_weights(layers: Sequence[torch.nn.Linear]) -> Tensor:
    """Put the weights into one ``[outputs, inputs]``, one after the other.

    The layers keep views of it, so that nothing is stored twice.
    """
    joined = torch.cat([layer.weight.detach() for layer in layers])
    begin = 0
    for layer in layers:
        layer.weight.data = joined[begin : begin + layer.out_features]
        begin += layer.out_features
    return joined


def join_biases(layers: Sequence[torch.nn.Linear]) -> Tensor | None:
    """Return the biases of the layers one after the other, or None where none has any."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            layer.weight.new_zeros(layer.out_features)
            if layer.bias is None
            else layer.bias.detach()
            for layer in layers
        ]
    )
