"""Attention of a decode step whose state is in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from roseinfer.kv.manager import KVBlockManager


class SlotAttention:
    """One new token for each of some slots: stored in the cache, and attended from."""

    def __init__(
        self,
        kv: KVBlockManager,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        kernel: Callable[..., torch.Tensor] | None,
        path_counts: Counter[str],
    ) -> None:
        self._kv = kv
        self._tables = tables
        self._lengths = lengths
        self._kernel = kernel
        self._path_counts = path_counts

    def attend_new(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store ``[slots, kv_heads, head_dim]`` and attend to all that is stored by then."""
        caches = self._kv.keys[layer], self._kv.values[layer]
        if self._kernel is None:
            self._path_counts[AttentionPath.SLOTS_REFERENCE] += 1
            return append_and_attend_reference(
                query, key, value, *caches, self._tables, self._lengths, scale
            )
        self._path_counts[AttentionPath.APPEND_AND_ATTEND] += 1
        return self._kernel(query, key, value, *caches, self._tables, self._lengths, scale)


def append_and_attend_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What the kernel must compute: write, gather everything, mask, softmax in float32."""
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
