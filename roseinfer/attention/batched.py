"""Attention by torch's SDPA, for a CPU: decoding sequences of similar length at once.

What sequences read is gathered first, with one copy, since SDPA needs the tokens of a sequence one
after another. Rows of a resident step, and attention with more than a scale and a window, are
computed as the reference computes them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.attention.backend import ResidentBatch, register
from roseinfer.attention.reference import ReferenceAttention, attend_sequences
from roseinfer.kv.manager import StepBatch
from roseinfer.paths import AttentionPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Reads:
    """Sequences with equally many new tokens, and what these read in the layers of a group."""

    rows: Tensor | slice
    """Rows of the new tokens, sequence by sequence."""
    cache_rows: Tensor
    """Blocks to gather, of a cache as ``[blocks * kv_heads, block_size * head_dim]``: the blocks of
    a sequence and a head one after another."""
    length: int
    """Tokens to read of the longest sequence; blocks are padded to its last one."""
    unused: Tensor
    """Gathered tokens after the ends of shorter sequences, of ``[tokens, head_dim]``. Whatever they
    hold, they must not take part, and a NaN times a weight of 0 is NaN."""
    positions: Tensor
    """Positions of the new tokens in what is gathered, ``[sequences, tokens]``."""
    visible: Tensor | None
    """Gathered tokens that each new token attends to, ``[sequences, 1, tokens, length]``; None for
    a prompt from its first token on, whose tokens attend to all before them."""


@register
class BatchedAttention(ReferenceAttention):
    """Attention with one call of SDPA for decoding sequences of similar length."""

    name: ClassVar[str] = "batched"
    default_device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch
        self._reads: dict[tuple[int, int | None], list[_Reads]] = {}
        """What a step reads, by layer group and window."""

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        match self._batch:
            case StepBatch() as batch:
                batch.write(layer, key, value)
                self.path_counts[AttentionPath.BATCHED] += 1
                out = torch.empty_like(query)
                for reads in self._reads_of(batch, layer):
                    out[reads.rows] = self._attend(layer, query[reads.rows], reads)
                return out
            case _:
                return super().store_and_attend(layer, query, key, value)

    def _attend(self, layer: int, query: Tensor, reads: _Reads) -> Tensor:
        """Attend from ``[sequences * tokens, q_heads, head_dim]``."""
        traits = self.traits[layer]
        keys, values = (self._gather(cache, reads) for cache in self.kv.caches(layer))
        sequences, tokens = reads.positions.shape
        new = query.view(sequences, tokens, *query.shape[1:])
        if traits.trait_names <= {"scale", "window"}:
            return _sdpa(new, keys, values, reads.visible, traits.scale).flatten(0, 1)
        return attend_sequences(new, keys, values, reads.positions, traits).flatten(0, 1)

    def _gather(self, cache: Tensor, reads: _Reads) -> Tensor:
        """Read ``[sequences, kv_heads, length, head_dim]``."""
        heads, _, head_dim = cache.shape[1:]
        blocks = cache.flatten(2).flatten(0, 1).index_select(0, reads.cache_rows)
        if len(reads.unused):
            blocks.view(-1, head_dim).index_fill_(0, reads.unused, 0)
        stored = blocks.view(len(reads.positions), heads, -1, head_dim)
        return stored[:, :, : reads.length]

    def _reads_of(self, batch: StepBatch, layer: int) -> list[_Reads]:
        """Return what the step reads in a layer; plan it once for all layers like it."""
        group, window = self.kv.group_of(layer), self.traits[layer].window
        if (group, window) not in self._reads:
            lists = [own[group] for own in batch.block_lists]
            self._reads[group, window] = [
                self._plan(layer, batch, lists, sequences, row)
                for sequences, row in self._read_together(batch)
            ]
        return self._reads[group, window]

    def _read_together(self, batch: StepBatch) -> list[tuple[list[int], int]]:
        """Return sequences to read together, and the first row of those with several tokens.

        Decoding sequences are padded to the longest, so none is with one of twice its blocks.
        """
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for at in range(batch.num_decodes):
            by_size[(-(-batch.lengths[at] // self.kv.block_size) - 1).bit_length()].append(at)
        together = [(sequences, 0) for sequences in by_size.values()]
        row = batch.num_decodes
        for at in range(batch.num_decodes, len(batch.counts)):
            together.append(([at], row))
            row += batch.counts[at]
        return together

    def _plan(
        self,
        layer: int,
        batch: StepBatch,
        lists: Sequence[list[int]],
        sequences: list[int],
        row: int,
    ) -> _Reads:
        size, heads, window = self.kv.block_size, self.kv.num_heads, self.traits[layer].window
        tokens = batch.counts[sequences[0]]
        first_id, tables, ends = self.kv.first_id(layer), [], []
        for at in sequences:
            length = batch.lengths[at]
            # Blocks that no new token attends to are left out: with a window they may be freed.
            begin = 0 if window is None else max(0, length - tokens - window + 1) // size
            tables.append([each - first_id for each in lists[at][begin : -(-length // size)]])
            ends.append(length - begin * size)
        width, length = max(map(len, tables)), max(ends)
        tables = [table + table[-1:] * (width - len(table)) for table in tables]
        tensor, arange = (
            partial(each, device=self.kv.device) for each in (torch.tensor, torch.arange)
        )
        cache_rows = tensor(tables)[:, None] * heads + arange(heads)[:, None]
        places, end = arange(width * size), tensor(ends)[:, None]
        after_end = (places >= end) & (places < length)
        unused = after_end[:, None].expand(-1, heads, -1).flatten().nonzero()[:, 0]
        positions = end - tokens + arange(tokens)
        visible = None
        if tokens < length or window is not None:
            distance = (positions[:, :, None] - places[:length])[:, None]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if row:
            rows: Tensor | slice = slice(row, row + tokens)
        elif len(sequences) in (1, batch.num_decodes):
            rows = slice(sequences[0], sequences[0] + len(sequences) * tokens)
        else:
            rows = tensor(sequences)
        return _Reads(rows, cache_rows.flatten(), length, unused, positions, visible)


def _sdpa(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float
) -> Tensor:
    """Attend in several sequences, ``[sequences, tokens, q_heads, head_dim]``.

    Query heads that share a head of keys become tokens of a decoding sequence, and heads of a
    batch of KV heads in a prompt: no key is copied for them.
    """
    sequences, tokens, q_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    shared = q_heads // kv_heads
    grouped = query.to(keys.dtype).view(sequences, tokens, kv_heads, shared, head_dim)
    if tokens == 1:
        out = scaled_dot_product_attention(
            grouped[:, 0], keys, values, attn_mask=visible, scale=scale
        )
        return out.reshape(query.shape).to(query.dtype)
    by_head = grouped[0].permute(1, 2, 0, 3)
    keys, values = (each[0][:, None].expand(-1, shared, -1, -1) for each in (keys, values))
    out = scaled_dot_product_attention(
        by_head, keys, values, attn_mask=visible, is_causal=visible is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(query.shape).to(query.dtype)
