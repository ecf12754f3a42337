"""The ways a write's tensors lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VIEWS = ("plain", "fused", "transposed", "strided")
"""Names for ``lay_out`` that change strides alone."""
LAYOUTS = (*VIEWS, "apart", "wider")
"""All names. ``apart``, where keys and values differ, is none of one tensor."""


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same ``[layers, tokens, heads, head_dim]`` values with other strides or dtype."""
    if layout == "fused":  # one third of a wider tensor, as a qkv projection leaves it
        wide = tensor.new_empty((*tensor.shape[:2], 3, *tensor.shape[2:]))
        wide[:, :, 1] = tensor
        return wide[:, :, 1]
    if layout == "transposed":  # [heads, tokens] in memory, as a prompt's keys are
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # every other element of the last dimension
        wide = tensor.new_empty((*tensor.shape, 2))
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "wider":  # a dtype the cache must convert from, losing nothing
        return tensor.float()
    return tensor.clone()
