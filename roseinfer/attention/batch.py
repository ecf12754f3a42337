"""One forward pass as attention sees it: whose tokens these are and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath
from roseinfer.attention.prefill import attend_chunk
from roseinfer.attention.reference import attend
from roseinfer.kv.kernels import load_kernels
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.work import Work

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.kv.staging import IndexStaging


def load_decode_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Imports Triton, so this is asked once and never on the hot path."""
    if not load_kernels(device)[0]:
        return None
    from roseinfer.attention.decode_triton import paged_attention_decode

    return paged_attention_decode


@dataclass
class AttentionBatch:
    """New tokens of several sequences, a sequence's together.

    ``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``, ``counts[i]`` how
    many of the tokens are its own, and ``lengths[i]`` how many it has with them. A group is
    planned when its first layer is stored. The decode kernel serves the sequences in front
    that have one token each.
    """

    kv: KVBlockManager
    block_lists: Sequence[Sequence[list[int]]]
    counts: Sequence[int]
    lengths: Sequence[int]
    path_counts: Counter[str]
    decode: Callable[..., torch.Tensor] | None
    """The kernel for single tokens; without it the reference attends."""
    staging: IndexStaging
    _plans: dict[int, AppendPlan] = field(default_factory=dict)
    _tables: dict[int, torch.Tensor] = field(default_factory=dict)

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
        outputs = []
        begin = self._singles if self.decode else 0
        if self.decode and begin:
            outputs.append(self._singly(self.decode, layer, query[:begin], scale))
        if begin < len(self.counts):
            outputs += self._chunks(layer, query, scale, begin)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _chunks(
        self, layer: int, query: torch.Tensor, scale: float, begin: int
    ) -> list[torch.Tensor]:
        """Of the sequences from ``begin`` on, whose tokens begin there too."""
        group = layer // self.kv.layers_per_group
        path, chunk = (
            (AttentionPath.CHUNK_SDPA, attend_chunk)
            if self.decode
            else (AttentionPath.REFERENCE, attend)
        )
        outputs = []
        at = begin
        for lists, count in zip(self.block_lists[begin:], self.counts[begin:], strict=True):
            keys, values = self.kv.gather_sequence(layer, lists[group])
            outputs.append(chunk(query[at : at + count], keys, values, scale))
            at += count
        self.path_counts[path] += 1
        return outputs

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
            longest=max(self.lengths[: self._singles]),
        )

    @cached_property
    def _device_lengths(self) -> torch.Tensor:
        return self.staging.stage([list(self.lengths[: self._singles])]).columns[0]

    def _table(self, group: int) -> torch.Tensor:
        if group not in self._tables:
            first = group * self.kv.max_blocks_per_layer
            lists = [own[group] for own in self.block_lists[: self._singles]]
            width = max(map(len, lists))
            flat: list[int] = []
            for block_ids in lists:
                flat += [block_id - first for block_id in block_ids]
                flat += [SCRATCH] * (width - len(block_ids))
            self.kv.work_counts[Work.TABLE_ROWS] += len(lists)
            self._tables[group] = self.staging.stage([flat]).columns[0].view(-1, width)
        return self._tables[group]
