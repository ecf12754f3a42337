"""Attention as written in a book: gather, mask, softmax in fp32. What the rest must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.manager import KVBlockManager


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of the last ``query.shape[0]`` positions of one sequence.

    Query is ``[tokens, q_heads, head_dim]``, keys and values ``[kv_heads, context,
    head_dim]``; every query position sees itself and what came before. Returned like the
    query, in its dtype.
    """
    tokens, q_heads, _ = query.shape
    kv_heads, context, _ = keys.shape
    per_kv_head = query.float().view(tokens, kv_heads, q_heads // kv_heads, -1)
    scores = torch.einsum("tkgd,kcd->kgtc", per_kv_head, keys.float()) * scale
    at = torch.arange(context - tokens, context, device=query.device)
    hidden = torch.arange(context, device=query.device)[None, :] > at[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    out = torch.einsum("kgtc,kcd->tkgd", weights, values.float())
    return out.reshape(query.shape).to(query.dtype)


def paged_attention_reference(
    kv: KVBlockManager,
    layer: int,
    query: torch.Tensor,
    block_lists: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attention of several sequences, their query tokens one after another."""
    outputs = []
    begin = 0
    for block_ids, length in zip(block_lists, query_lens, strict=True):
        keys, values = kv.gather_sequence(layer, block_ids)
        outputs.append(attend(query[begin : begin + length], keys, values, scale))
        begin += length
    return torch.cat(outputs)
