"""Attention by Triton and CUDA kernels, which read the paged cache in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, register
from roseinfer.errors import ConfigError
from roseinfer.kernels.runtime import unusable_reason
from roseinfer.kv.manager import StepBatch
from roseinfer.kv.pool import SCRATCH
from roseinfer.layer_traits import ALL_TRAITS
from roseinfer.paths import AttentionPath, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.layer_traits import RotaryEmbedding

_MAX_TILE_ROWS = 64
"""Most query tokens times heads of a program; a single token may exceed it."""
_MIN_TILE_ROWS = 16
"""Fewest rows that tensor cores multiply."""
_MAX_SORTED_TILES = 5000
"""Maximum of tiles times KV heads for sorting tiles. With more, a sequence's keys and values would
be fetched more than once where its tiles are not adjacent."""


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Attention kernels of a forward pass."""

    decode: Callable[..., Tensor]
    """Attention of sequences with one new token."""
    prefill_chunks: Callable[..., Tensor]
    """Attention of sequences with several new tokens."""
    prefill_cuda: Callable[..., Tensor]
    """Attention of sequences with many new tokens, in tiles of ``prefill_tile_tokens``."""
    prefill_tile_tokens: Callable[..., int]
    """Tokens of a tile of ``prefill_cuda``; 0 where it cannot run or is not the fastest."""
    append_and_attend: Callable[..., Tensor]
    """Store and attention of the new tokens of resident sequences."""
    append: Callable[..., None]
    """Store of the new tokens of rows, by blocks and positions on the device."""
    rotate: Callable[..., None]
    """Rotation of queries, keys or both, in place."""
    can_rotate_queries: Callable[..., bool]
    """Support check for rotation inside ``prefill_cuda``, which saves a pass over the queries."""
    append_and_attend_cuda: Callable[..., Tensor]
    """CUDA equivalent of ``append_and_attend``, for inputs that ``can_attend_rows`` accepts."""
    can_attend_rows: Callable[..., bool]
    """Support check of ``append_and_attend_cuda``."""


def load_attention_kernels(device: torch.device) -> AttentionKernels | None:
    """Import Triton and return the kernels; return None where they cannot run."""
    if unusable_reason(device):
        return None
    from roseinfer.kernels.cuda.decode_attention import attend_rows, can_attend_rows
    from roseinfer.kernels.cuda.prefill_attention import (
        attend_prompts,
        can_rotate_queries,
        prefill_tile_tokens,
    )
    from roseinfer.kernels.triton.append import launch_identity_pos
    from roseinfer.kernels.triton.decode_attention import append_and_attend, paged_attention_decode
    from roseinfer.kernels.triton.prefill_attention import paged_attention_chunks
    from roseinfer.kernels.triton.rope import rotate

    return AttentionKernels(
        decode=paged_attention_decode,
        prefill_chunks=paged_attention_chunks,
        prefill_cuda=attend_prompts,
        prefill_tile_tokens=prefill_tile_tokens,
        append_and_attend=append_and_attend,
        append=launch_identity_pos,
        rotate=rotate,
        can_rotate_queries=can_rotate_queries,
        append_and_attend_cuda=attend_rows,
        can_attend_rows=can_attend_rows,
    )


@register
class TritonAttention(AttentionBackend):
    """Attention by kernels: for single tokens, for chunks of prompts and for resident steps."""

    name: ClassVar[str] = "triton"
    supported_traits: ClassVar[frozenset[str]] = ALL_TRAITS
    default_device_types: ClassVar[frozenset[str]] = frozenset({"cuda"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kernels = load_attention_kernels(self.kv.device)
        if kernels is None:
            raise ConfigError(f"attention_backend='triton': {unusable_reason(self.kv.device)}")
        self._kernels = kernels

    @classmethod
    def unusable_reason(cls, device: torch.device) -> str:
        return unusable_reason(device)

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch
        self._block_tables: dict[int, Tensor] = {}
        self._lengths: dict[int, Tensor] = {}
        """Lengths of the first sequences, by their number."""
        self._row_lengths: Tensor | None = None
        """Lengths of resident rows, new tokens included; None until needed."""
        self._tiles: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
        """Tiles of queries, by the arguments of ``_tile_queries``."""
        self._write_positions: dict[int, tuple[Tensor, Tensor]] = {}
        """Blocks and positions of the new tokens of drafts, by layer group."""

    def single_row_batch(self) -> ResidentBatch | None:
        match self._batch:
            case ResidentBatch(has_drafts=False, long_context=False) as rows if (
                len(rows.lengths) == 1
            ):
                return rows
            case _:
                return None

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        match self._batch:
            case ResidentBatch(has_drafts=True) as rows:
                return self._attend_drafts(rows, layer, query, key, value)
            case ResidentBatch() as rows:
                return self._attend_rows(rows, layer, query, key, value, None)
            case StepBatch() as batch:
                batch.write(layer, key, value)
                return self.attend(batch, layer, query)

    def rotate_store_and_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: RotaryEmbedding,
    ) -> Tensor:
        match self._batch:
            case ResidentBatch(has_drafts=False) as rows if rotation.query_norm_weight is None:
                return self._attend_rows(rows, layer, query, key, value, rotation)
            case StepBatch(num_decodes=num_decodes, counts=counts) as batch if num_decodes < len(
                counts
            ) and (tile_q := self._rotating_tile_tokens(batch, layer, query, rotation)):
                if num_decodes:
                    decodes = (each[:num_decodes] for each in (query, key, positions))
                    self._kernels.rotate(*decodes, rotation)
                self._kernels.rotate(None, key[num_decodes:], positions[num_decodes:], rotation)
                batch.write(layer, key, value)
                return self.attend(batch, layer, query, tile_q, rotation)
            case _:
                self._kernels.rotate(query, key, positions, rotation)
                return self.store_and_attend(layer, query, key, value)

    def _attend_rows(
        self,
        rows: ResidentBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: RotaryEmbedding | None,
    ) -> Tensor:
        """Store the new tokens of all rows and attend from them in one kernel."""
        heads, caches, traits = (query, key, value), self.kv.caches(layer), self.traits[layer]
        kernel, path = self._kernels.append_and_attend, AttentionPath.APPEND_AND_ATTEND
        whole = rotation is None or self._kernels.can_rotate_queries(query, rotation)
        if whole and self._kernels.can_attend_rows(*heads, *caches, traits):
            kernel, path = (
                self._kernels.append_and_attend_cuda,
                AttentionPath.APPEND_AND_ATTEND_CUDA,
            )
        self.path_counts[path] += 1
        table = rows.tables[self.kv.group_of(layer)]
        return kernel(*heads, *caches, table, rows.lengths, traits, rotation)

    def can_attend_last_tokens(self, rows: Tensor | None) -> bool:
        match self._batch:
            case StepBatch(counts=counts) if rows is not None:
                return len(rows) == len(counts)  # one row per sequence
            case _:
                return False

    def attend_last_tokens(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: RotaryEmbedding | None,
        rows: Tensor,
    ) -> Tensor:
        batch = self._batch
        assert isinstance(batch, StepBatch)
        if rotation is not None:
            self._kernels.rotate(query, key, positions, rotation)
        batch.write(layer, key, value)
        return self._attend_decodes(batch, layer, query.index_select(0, rows), len(batch.counts))

    def attend(
        self,
        batch: StepBatch,
        layer: int,
        query: Tensor,
        tile_q: int = 0,
        rotation: RotaryEmbedding | None = None,
    ) -> Tensor:
        """Compute the attention of ``[tokens, q_heads, head_dim]`` over all stored tokens.

        With a rotation, the queries of prompts are not rotated yet: their kernel does so, in tiles
        of ``tile_q`` tokens.
        """
        outputs = []
        if batch.num_decodes:
            outputs.append(
                self._attend_decodes(batch, layer, query[: batch.num_decodes], batch.num_decodes)
            )
        if batch.num_decodes < len(batch.counts):
            prefill_query = query[batch.num_decodes :]
            if tile_q := tile_q or self._prefill_tile_tokens(batch, layer, prefill_query):
                outputs.append(
                    self._attend_prefill_cuda(batch, layer, prefill_query, tile_q, rotation)
                )
            else:
                outputs.append(self._attend_chunks(batch, layer, prefill_query))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_drafts(
        self, rows: ResidentBatch, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store the new tokens of all rows, then attend from each as a sequence of its own."""
        self.path_counts[AttentionPath.DECODE_TRITON] += 1
        group = self.kv.group_of(layer)
        if group not in self._write_positions:
            size = self.kv.block_size
            block = rows.tables[group].gather(1, (rows.lengths // size)[:, None])[:, 0]
            self._write_positions[group] = block, rows.lengths % size
        if self._row_lengths is None:
            self._row_lengths = rows.lengths + 1
        caches = self.kv.caches(layer)
        self._kernels.append(*caches, key, value, *self._write_positions[group])
        return self._kernels.decode(
            query, *caches, rows.tables[group], self._row_lengths, self.traits[layer]
        )

    def _attend_decodes(self, batch: StepBatch, layer: int, query: Tensor, count: int) -> Tensor:
        """Compute the attention of the last tokens of the first ``count`` sequences."""
        self.path_counts[AttentionPath.DECODE_TRITON] += 1
        if count not in self._lengths:
            self._lengths[count] = self.staging.stage([list(batch.lengths[:count])]).columns[0]
        caches, table = self.kv.caches(layer), self._block_table(batch, layer)
        return self._kernels.decode(query, *caches, table, self._lengths[count], self.traits[layer])

    def _prefill_tile_tokens(self, batch: StepBatch, layer: int, query: Tensor) -> int:
        """Return the tile size of ``prefill_cuda`` in tokens; 0 where another kernel attends."""
        limits = {"most": max(batch.counts), "longest": max(batch.lengths)}
        caches, traits = self.kv.caches(layer), self.traits[layer]
        return self._kernels.prefill_tile_tokens(query, *caches, traits, **limits)

    def _rotating_tile_tokens(
        self, batch: StepBatch, layer: int, query: Tensor, rotation: RotaryEmbedding
    ) -> int:
        """Return the tile size of ``prefill_cuda`` if it can rotate the queries too, else 0."""
        can = self._kernels.can_rotate_queries(query, rotation)
        return self._prefill_tile_tokens(batch, layer, query) if can else 0

    def _attend_prefill_cuda(
        self,
        batch: StepBatch,
        layer: int,
        query: Tensor,
        tile_q: int,
        rotation: RotaryEmbedding | None,
    ) -> Tensor:
        """Compute the attention of sequences with many new tokens."""
        self.path_counts[AttentionPath.PREFILL_CUDA] += 1
        caches, table = self.kv.caches(layer), self._block_table(batch, layer)
        tiles = self._tile_queries(batch, tile_q, mixed=True)
        return self._kernels.prefill_cuda(
            query, *caches, table, tiles, self.traits[layer], rotation
        )

    def _attend_chunks(self, batch: StepBatch, layer: int, query: Tensor) -> Tensor:
        """Compute the attention of sequences with several new tokens."""
        caches, table = self.kv.caches(layer), self._block_table(batch, layer)
        traits, longest, max_count = self.traits[layer], max(batch.lengths), max(batch.counts)
        self.path_counts[AttentionPath.CHUNK_TRITON] += 1
        heads = 1 << (query.shape[1] // self.kv.num_heads - 1).bit_length()
        tile_tokens = 1 << (max_count - 1).bit_length()
        tile_q = max(1, _MIN_TILE_ROWS // heads, min(_MAX_TILE_ROWS // heads, tile_tokens))
        tiles = self._tile_queries(batch, tile_q)
        return self._kernels.prefill_chunks(
            query, *caches, table, tiles, traits, tile_q=tile_q, longest=longest
        )

    def _tile_queries(
        self, batch: StepBatch, tile_q: int, *, mixed: bool = False
    ) -> tuple[Tensor, ...]:
        """Split the sequences after the decodes into tiles of tokens, one per program.

        If ``mixed``, and unless there are too many, the tiles of all sequences are sorted by
        context, the longest first, which balances the load of persistent programs.
        """
        if (tile_q, mixed) in self._tiles:
            return self._tiles[tile_q, mixed]
        tiles: list[tuple[int, int, int, int]] = []
        row = 0
        for at in range(batch.num_decodes, len(batch.counts)):
            count = batch.counts[at]
            first = batch.lengths[at] - count
            for begin in reversed(range(0, count, tile_q)):  # longest first, for load balance
                tiles.append((at, row + begin, min(tile_q, count - begin), first + begin))
            row += count
        if mixed and len(tiles) * self.kv.num_heads <= _MAX_SORTED_TILES:
            tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
        columns = [list(column) for column in zip(*tiles, strict=True)]
        self._tiles[tile_q, mixed] = self.staging.stage(columns).columns
        return self._tiles[tile_q, mixed]

    def _block_table(self, batch: StepBatch, layer: int) -> Tensor:
        """Return the block tables of a layer's group on the device; upload them once a step."""
        group = self.kv.group_of(layer)
        if group not in self._block_tables:
            first = self.kv.first_id(layer)
            lists = [block_lists[group] for block_lists in batch.block_lists]
            width = max(map(len, lists))
            flat: list[int] = []
            for block_ids in lists:
                flat += [block_id - first for block_id in block_ids]
                flat += [SCRATCH] * (width - len(block_ids))
            self.kv.work_counts[Work.TABLE_ROWS] += len(lists)
            self._block_tables[group] = self.staging.stage([flat]).columns[0].view(-1, width)
        return self._block_tables[group]
