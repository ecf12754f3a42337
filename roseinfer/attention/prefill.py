"""Attention of a whole prompt, or of a chunk of one behind what is already cached."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``reference.attend``, by torch's fused attention.

    The chunk's end is the end of the context: what comes behind it is not in ``keys``.
    """
    tokens, context = query.shape[0], keys.shape[1]
    mask = None
    if tokens < context:
        mask = torch.ones((tokens, context), dtype=torch.bool, device=query.device)
        mask = mask.tril(context - tokens)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return out[0].transpose(0, 1)
