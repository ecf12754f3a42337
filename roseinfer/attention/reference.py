"""The reference that all attention must equal: gather, mask, and softmax in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, StepBatch, register
from roseinfer.attention.paths import AttentionPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kv.manager import KVBlockManager


@register
class ReferenceAttention(AttentionBackend):
    """Attention by torch operations, which run anywhere."""

    name: ClassVar[str] = "reference"

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kv, scale = self.kv, self.scales[layer]
        match self._batch:
            case ResidentBatch(tables, lengths):
                self.path_counts[AttentionPath.SLOTS_REFERENCE] += 1
                caches = kv.keys[layer], kv.values[layer]
                return append_and_attend_reference(
                    query, key, value, *caches, tables, lengths, scale
                )
            case StepBatch(new, block_lists, counts):
                new.write(layer, key, value)
                self.path_counts[AttentionPath.REFERENCE] += 1
                lists = [own[layer // kv.layers_per_group] for own in block_lists]
                return paged_attention_reference(kv, layer, query, lists, counts, scale)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute the attention of the last ``query.shape[0]`` positions of one sequence.

    Query and result are ``[tokens, q_heads, head_dim]``, keys and values ``[kv_heads, context,
    head_dim]``; every query position sees itself and what came before.
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
    query: Tensor,
    block_lists: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """Compute the attention of several sequences, whose query tokens follow one another."""
    outputs = []
    begin = 0
    for block_ids, length in zip(block_lists, query_lens, strict=True):
        keys, values = kv.gather_sequence(layer, block_ids)
        outputs.append(attend(query[begin : begin + length], keys, values, scale))
        begin += length
    return torch.cat(outputs)


def append_and_attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Compute what the kernel of that name must: write, gather, mask, and softmax in float32."""
    slots, q_heads, head_dim = query.shape
    _, kv_heads, size, _ = k_cache.shape
    block = tables.gather(1, (lengths // size)[:, None])[:, 0]
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.transpose(1, 2).index_put_((block, lengths % size), new.to(cache.dtype))
    stored = torch.arange(tables.shape[1] * size, device=query.device) <= lengths[:, None]
    unused = ~stored[:, None, :, None]
    keys, values = (  # [slots, kv_heads, tokens, head_dim], with nothing in it but what is stored
        cache[tables].transpose(1, 2).flatten(2, 3).float().masked_fill(unused, 0)
        for cache in (k_cache, v_cache)
    )
    grouped = query.float().view(slots, kv_heads, q_heads // kv_heads, head_dim)
    scores = (grouped @ keys.transpose(2, 3) * scale).masked_fill(
        ~stored[:, None, None], float("-inf")
    )
    return (scores.softmax(-1) @ values).view(query.shape).to(query.dtype)
