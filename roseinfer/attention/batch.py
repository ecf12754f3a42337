"""One forward pass as attention sees it: whose tokens these are and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath
from roseinfer.attention.reference import attend
from roseinfer.kernels.runtime import load_kernels
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.work import Work

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.kv.staging import IndexStaging


_MOST_ROWS = 64
"""Query tokens times heads that a program takes, unless there are more heads than that."""
_LEAST_ROWS = 16
"""Tensor cores take no fewer."""


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The Triton kernels of a forward pass."""

    decode: Callable[..., torch.Tensor]
    """For sequences that have one new token."""
    chunks: Callable[..., torch.Tensor]
    """For those that have more."""


def load_attention_kernels(device: torch.device) -> AttentionKernels | None:
    """None where they cannot run. Imports Triton, so this is never asked on the hot path."""
    if not load_kernels(device)[0]:
        return None
    from roseinfer.kernels.attend_chunks import paged_attention_chunks
    from roseinfer.kernels.attend_decode import paged_attention_decode

    return AttentionKernels(paged_attention_decode, paged_attention_chunks)


@dataclass
class AttentionBatch:
    """New tokens of several sequences, a sequence's together.

    ``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``, ``counts[i]`` how
    many of the tokens are its own, and ``lengths[i]`` how many it has with them. A group is
    planned when its first layer is stored. Sequences in front that have one new token each
    are served by a kernel of their own.
    """

    kv: KVBlockManager
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    lengths: Sequence[int]
    path_counts: Counter[str]
    kernels: AttentionKernels | None
    """Without them the reference attends."""
    staging: IndexStaging
    _plans: dict[int, AppendPlan] = field(default_factory=dict)
    _tables: dict[int, torch.Tensor] = field(default_factory=dict)
    _tiles: tuple[int, tuple[torch.Tensor, ...]] | None = None

    def attend_new(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store the tokens' keys and values, and attend to all that is stored by then."""
        self.store(layer, key, value)
        return self.attend(layer, query, scale)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append ``[tokens, kv_heads, head_dim]`` to every sequence in one layer."""
        group = layer // self.kv.layers_per_group
        lists = [own[group] for own in self.block_lists]
        if self.kv.layers_per_group == 1 and self.is_decode:
            # The arrangement in which every switch of the append policy counts.
            self.kv.append_token_batch(layer, lists, key, value)
            return
        if group not in self._plans:
            self._plans[group] = self.kv.plan_append(layer, lists, self.counts)
        self.kv.write(self._plans[group], layer, key, value)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention for ``[tokens, q_heads, head_dim]`` over what is stored by now."""
        if self.kernels is None:
            return self._by_reference(layer, query, scale)
        outputs = []
        singles = self._singles
        if singles:
            outputs.append(self._singly(self.kernels.decode, layer, query[:singles], scale))
        if singles < len(self.counts):
            outputs.append(self._chunks(self.kernels.chunks, layer, query[singles:], scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _by_reference(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        group = layer // self.kv.layers_per_group
        outputs = []
        at = 0
        for lists, count in zip(self.block_lists, self.counts, strict=True):
            keys, values = self.kv.gather_sequence(layer, lists[group])
            outputs.append(attend(query[at : at + count], keys, values, scale))
            at += count
        self.path_counts[AttentionPath.REFERENCE] += 1
        return torch.cat(outputs)

    def _chunks(
        self, chunks: Callable[..., torch.Tensor], layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Of the sequences that have several new tokens."""
        self.path_counts[AttentionPath.CHUNK_TRITON] += 1
        group_size = query.shape[1] // self.kv.num_heads
        if self._tiles is None:
            self._tiles = self._cut(group_size)
        tile_q, tiles = self._tiles
        return chunks(
            query,
            self.kv.keys[layer],
            self.kv.values[layer],
            self._table(layer // self.kv.layers_per_group),
            tiles,
            scale,
            tile_q=tile_q,
            longest=max(self.lengths),
        )

    def _cut(self, group_size: int) -> tuple[int, tuple[torch.Tensor, ...]]:
        """The sequences behind the single tokens as tiles of tokens, one for each program."""
        tile_q = _tokens_of_a_program(group_size, max(self.counts))
        tiles: list[tuple[int, int, int, int]] = []
        row = 0
        for at in range(self._singles, len(self.counts)):
            count = self.counts[at]
            first = self.lengths[at] - count
            for begin in range(0, count, tile_q):
                tiles.append((at, row + begin, min(tile_q, count - begin), first + begin))
            row += count
        columns = [list(column) for column in zip(*tiles, strict=True)]
        return tile_q, self.staging.stage(columns).columns

    @property
    def is_decode(self) -> bool:
        return self._singles == len(self.counts)

    @cached_property
    def _singles(self) -> int:
        """How many sequences in front have one new token each."""
        more = (at for at, count in enumerate(self.counts) if count > 1)
        return next(more, len(self.counts))

    def _singly(
        self,
        decode: Callable[..., torch.Tensor],
        layer: int,
        query: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        self.path_counts[AttentionPath.DECODE_TRITON] += 1
        return decode(
            query,
            self.kv.keys[layer],
            self.kv.values[layer],
            self._table(layer // self.kv.layers_per_group),
            self._device_lengths,
            scale,
        )

    @cached_property
    def _device_lengths(self) -> torch.Tensor:
        return self.staging.stage([list(self.lengths[: self._singles])]).columns[0]

    def _table(self, group: int) -> torch.Tensor:
        if group not in self._tables:
            first = group * self.kv.max_blocks_per_layer
            lists = [own[group] for own in self.block_lists]
            width = max(map(len, lists))
            flat: list[int] = []
            for block_ids in lists:
                flat += [block_id - first for block_id in block_ids]
                flat += [SCRATCH] * (width - len(block_ids))
            self.kv.work_counts[Work.TABLE_ROWS] += len(lists)
            self._tables[group] = self.staging.stage([flat]).columns[0].view(-1, width)
        return self._tables[group]


def _tokens_of_a_program(group_size: int, longest: int) -> int:
    """How many tokens of a sequence a program takes, where the longest has so many new ones."""
    heads = 1 << (group_size - 1).bit_length()
    wanted = 1 << (longest - 1).bit_length()
    return max(1, _LEAST_ROWS // heads, min(_MOST_ROWS // heads, wanted))
