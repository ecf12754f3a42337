"""Reference attention, which all backends must equal: gather, mask and softmax in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, register
from roseinfer.kv.manager import StepBatch
from roseinfer.layer_traits import ALL_TRAITS
from roseinfer.paths import AttentionPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.layer_traits import LayerTraits


@register
class ReferenceAttention(AttentionBackend):
    """Attention by torch operations, which run on any device."""

    name: ClassVar[str] = "reference"
    supported_traits: ClassVar[frozenset[str]] = ALL_TRAITS
    uses_kernels: ClassVar[bool] = False

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kv, traits = self.kv, self.traits[layer]
        match self._batch:
            case ResidentBatch(tables, lengths):
                self.path_counts[AttentionPath.RESIDENT_REFERENCE] += 1
                caches = kv.caches(layer)
                table = tables[kv.group_of(layer)]
                return append_and_attend_reference(
                    query, key, value, *caches, table, lengths, traits
                )
            case StepBatch(block_lists=block_lists, counts=counts) as batch:
                batch.write(layer, key, value)
                self.path_counts[AttentionPath.REFERENCE] += 1
                lists = [lists_of_row[kv.group_of(layer)] for lists_of_row in block_lists]
                return paged_attention_reference(kv, layer, query, lists, counts, traits)


def attend(query: Tensor, keys: Tensor, values: Tensor, traits: LayerTraits) -> Tensor:
    """Compute the attention of the last ``query.shape[0]`` positions of one sequence.

    Query and result are ``[tokens, q_heads, head_dim]``, keys and values ``[kv_heads, context,
    head_dim]``; every query position attends to itself and to the positions before it.
    """
    tokens, context = len(query), keys.shape[1]
    at = torch.arange(context - tokens, context, device=query.device)[None]
    return attend_sequences(query[None], keys[None], values[None], at, traits)[0]


def attend_sequences(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, traits: LayerTraits
) -> Tensor:
    """Attend in several sequences with queries at ``positions``, ``[sequences, tokens]``.

    Query and result are ``[sequences, tokens, q_heads, head_dim]``, keys and values ``[sequences,
    kv_heads, context, head_dim]``.
    """
    sequences, tokens, q_heads, _ = query.shape
    kv_heads, context = keys.shape[1:3]
    grouped = query.float().view(sequences, tokens, kv_heads, q_heads // kv_heads, -1)
    scores = torch.einsum("stkgd,skcd->skgtc", grouped, keys.float()) * traits.scale
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    distance = positions[:, :, None] - torch.arange(context, device=query.device)
    if traits.slopes is not None:
        slopes = traits.slopes.float().view(kv_heads, -1, 1, 1)
        scores = scores - slopes * distance[:, None, None]
    hidden = _attention_mask(distance, traits)[:, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if traits.sinks is not None:
        sinks = traits.sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, dim=-1)[..., :context]
    out = torch.einsum("skgtc,skcd->stkgd", weights, values.float())
    return out.reshape(query.shape).to(query.dtype)


def _attention_mask(distance: Tensor, traits: LayerTraits) -> Tensor:
    """Return True for hidden keys, by the query's distance after each key."""
    hidden = distance < 0
    return hidden if traits.window is None else hidden | (distance >= traits.window)


def paged_attention_reference(
    kv: KVBlockManager,
    layer: int,
    query: Tensor,
    block_lists: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    traits: LayerTraits,
) -> Tensor:
    """Compute the attention of several sequences, whose query tokens are concatenated."""
    outputs = []
    begin = 0
    for block_ids, length in zip(block_lists, query_lens, strict=True):
        keys, values = kv.gather_sequence(layer, block_ids)
        outputs.append(attend(query[begin : begin + length], keys, values, traits))
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
    traits: LayerTraits,
) -> Tensor:
    """Append and attend in torch, as ``append_and_attend`` must: softmax in float32."""
    size = k_cache.shape[2]
    block = tables.gather(1, (lengths // size)[:, None])[:, 0]
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.transpose(1, 2).index_put_((block, lengths % size), new.to(cache.dtype))
    distance = lengths[:, None] - torch.arange(tables.shape[1] * size, device=query.device)
    unused = _attention_mask(distance, traits)[:, None, :, None]
    keys, values = (  # [slots, kv_heads, tokens, head_dim]; unused entries, maybe NaN, become 0
        cache[tables].transpose(1, 2).flatten(2, 3).float().masked_fill(unused, 0)
        for cache in (k_cache, v_cache)
    )
    return attend_sequences(query[:, None], keys, values, lengths[:, None], traits)[:, 0]
