"""Attention by Triton kernels, which read blocks where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, StepBatch, register
from roseinfer.errors import ConfigError
from roseinfer.kernels.runtime import why_unusable
from roseinfer.kv.pool import SCRATCH
from roseinfer.layer_traits import ALL_TRAITS
from roseinfer.paths import AttentionPath, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.layer_traits import Rotation

_MOST_ROWS = 64
"""A program takes at most so many query tokens times heads, or one token where heads are more."""
_LEAST_ROWS = 16
"""Tensor cores take no fewer."""
_MOST_MIXED = 5000
"""Tiles by KV heads. If there are more, a sequence's keys and values are fetched more than once
where its tiles do not stand together."""


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The Triton kernels of a forward pass."""

    decode: Callable[..., Tensor]
    """Attends for sequences that have one new token."""
    chunks: Callable[..., Tensor]
    """Attends for those that have more."""
    prompts: Callable[..., Tensor]
    """Attends for those that have many more, so many tokens a tile as ``prompt_tile`` says."""
    prompt_tile: Callable[..., int]
    append_and_attend: Callable[..., Tensor]
    """Stores the new tokens of resident sequences and attends from them."""
    append: Callable[..., None]
    """Stores the new tokens of rows, in blocks and at positions that the device knows."""
    rotate: Callable[..., None]
    """Rotates queries, keys or both in place."""
    rotates_queries: Callable[..., bool]
    """Tells if ``prompts`` can rotate queries itself, which saves going through all of them."""
    rows: Callable[..., Tensor]
    """Does what ``append_and_attend`` does, where ``attends_rows`` says so."""
    attends_rows: Callable[..., bool]


def load_attention_kernels(device: torch.device) -> AttentionKernels | None:
    """Return the kernels, or None where they cannot run. This imports Triton."""
    if why_unusable(device):
        return None
    from roseinfer.kernels.cuda.decode_attention import attend_rows, attends_rows
    from roseinfer.kernels.cuda.prefill_attention import (
        attend_prompts,
        prompt_tile,
        rotates_queries,
    )
    from roseinfer.kernels.triton.append import launch_identity_pos
    from roseinfer.kernels.triton.decode_attention import append_and_attend, paged_attention_decode
    from roseinfer.kernels.triton.prefill_attention import paged_attention_chunks
    from roseinfer.kernels.triton.rope import rotate

    return AttentionKernels(
        decode=paged_attention_decode,
        chunks=paged_attention_chunks,
        prompts=attend_prompts,
        prompt_tile=prompt_tile,
        append_and_attend=append_and_attend,
        append=launch_identity_pos,
        rotate=rotate,
        rotates_queries=rotates_queries,
        rows=attend_rows,
        attends_rows=attends_rows,
    )


@register
class TritonAttention(AttentionBackend):
    """Has a kernel for single tokens, one for chunks of prompts, and one for resident steps."""

    name: ClassVar[str] = "triton"
    knows: ClassVar[frozenset[str]] = ALL_TRAITS
    best_on: ClassVar[frozenset[str]] = frozenset({"cuda"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kernels = load_attention_kernels(self.kv.device)
        if kernels is None:
            raise ConfigError(f"attention_backend='triton': {why_unusable(self.kv.device)}")
        self._kernels = kernels

    @classmethod
    def why_unusable(cls, device: torch.device) -> str:
        return why_unusable(device)

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch
        self._tables: dict[int, Tensor] = {}
        self._lengths: dict[int, Tensor] = {}
        """Those of so many sequences in front."""
        self._row_lengths: Tensor | None = None
        """Those of rows, each with its new token."""
        self._tiles: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
        self._places: dict[int, tuple[Tensor, Tensor]] = {}

    def lone_row(self) -> ResidentBatch | None:
        match self._batch:
            case ResidentBatch(drafts=False, long=False) as rows if len(rows.lengths) == 1:
                return rows
            case _:
                return None

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        match self._batch:
            case ResidentBatch(drafts=True) as rows:
                return self._attend_drafts(rows, layer, query, key, value)
            case ResidentBatch() as rows:
                return self._attend_rows(rows, layer, query, key, value, None)
            case StepBatch() as batch:
                batch.new.write(layer, key, value)
                return self.attend(batch, layer, query)

    def attend_rotated(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        match self._batch:
            case ResidentBatch(drafts=False) as rows if rotation.query_gain is None:
                return self._attend_rows(rows, layer, query, key, value, rotation)
            case StepBatch(singles=singles, counts=counts) as batch if singles < len(counts) and (
                tile_q := self._rotating_tile(batch, layer, query, rotation)
            ):
                if singles:
                    in_front = (each[:singles] for each in (query, key, positions))
                    self._kernels.rotate(*in_front, rotation)
                self._kernels.rotate(None, key[singles:], positions[singles:], rotation)
                batch.new.write(layer, key, value)
                return self.attend(batch, layer, query, tile_q, rotation)
            case _:
                self._kernels.rotate(query, key, positions, rotation)
                return self.attend_new(layer, query, key, value)

    def _attend_rows(
        self,
        rows: ResidentBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation | None,
    ) -> Tensor:
        """Store the new tokens of all rows and attend from them, in one kernel."""
        heads, caches, traits = (query, key, value), self.kv.caches(layer), self.traits[layer]
        kernel, path = self._kernels.append_and_attend, AttentionPath.APPEND_AND_ATTEND
        whole = rotation is None or self._kernels.rotates_queries(query, rotation)
        if whole and self._kernels.attends_rows(*heads, *caches, traits):
            kernel, path = self._kernels.rows, AttentionPath.ROWS
        self.path_counts[path] += 1
        table = rows.tables[self.kv.group_of(layer)]
        return kernel(*heads, *caches, table, rows.lengths, traits, rotation)

    def ends_alone(self, rows: Tensor | None) -> bool:
        match self._batch:
            case StepBatch(counts=counts) if rows is not None:
                return len(rows) == len(counts)  # one for each sequence
            case _:
                return False

    def attend_ends(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotation: Rotation | None,
        rows: Tensor,
    ) -> Tensor:
        batch = self._batch
        assert isinstance(batch, StepBatch)
        if rotation is not None:
            self._kernels.rotate(query, key, positions, rotation)
        batch.new.write(layer, key, value)
        return self._singly(batch, layer, query.index_select(0, rows), len(batch.counts))

    def attend(
        self,
        batch: StepBatch,
        layer: int,
        query: Tensor,
        tile_q: int = 0,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Compute the attention of ``[tokens, q_heads, head_dim]`` over all that is stored.

        With a rotation, the queries of prompts are yet to be rotated, by their kernel, in tiles of
        ``tile_q`` tokens.
        """
        outputs = []
        if batch.singles:
            outputs.append(self._singly(batch, layer, query[: batch.singles], batch.singles))
        if batch.singles < len(batch.counts):
            behind = query[batch.singles :]
            if tile_q := tile_q or self._prompt_tile(batch, layer, behind):
                outputs.append(self._prompts(batch, layer, behind, tile_q, rotation))
            else:
                outputs.append(self._chunks(batch, layer, behind))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_drafts(
        self, rows: ResidentBatch, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store the new tokens of all rows, and attend from each as from a single one."""
        self.path_counts[AttentionPath.DECODE_TRITON] += 1
        group = self.kv.group_of(layer)
        if group not in self._places:
            size = self.kv.block_size
            block = rows.tables[group].gather(1, (rows.lengths // size)[:, None])[:, 0]
            self._places[group] = block, rows.lengths % size
        if self._row_lengths is None:
            self._row_lengths = rows.lengths + 1
        caches = self.kv.caches(layer)
        self._kernels.append(*caches, key, value, *self._places[group])
        return self._kernels.decode(
            query, *caches, rows.tables[group], self._row_lengths, self.traits[layer]
        )

    def _singly(self, batch: StepBatch, layer: int, query: Tensor, count: int) -> Tensor:
        """Compute the attention of the last tokens of so many sequences in front."""
        self.path_counts[AttentionPath.DECODE_TRITON] += 1
        if count not in self._lengths:
            self._lengths[count] = self.staging.stage([list(batch.lengths[:count])]).columns[0]
        caches, table = self.kv.caches(layer), self._table(batch, layer)
        return self._kernels.decode(query, *caches, table, self._lengths[count], self.traits[layer])

    def _prompt_tile(self, batch: StepBatch, layer: int, query: Tensor) -> int:
        """Return how many tokens a tile has for the kernel of prompts; 0 where another attends."""
        how_many = {"most": max(batch.counts), "longest": max(batch.lengths)}
        caches, traits = self.kv.caches(layer), self.traits[layer]
        return self._kernels.prompt_tile(query, *caches, traits, **how_many)

    def _rotating_tile(
        self, batch: StepBatch, layer: int, query: Tensor, rotation: Rotation
    ) -> int:
        """Return the same where that kernel can rotate the queries too; else 0."""
        can = self._kernels.rotates_queries(query, rotation)
        return self._prompt_tile(batch, layer, query) if can else 0

    def _prompts(
        self, batch: StepBatch, layer: int, query: Tensor, tile_q: int, rotation: Rotation | None
    ) -> Tensor:
        """Compute the attention of the sequences behind, which have many new tokens."""
        self.path_counts[AttentionPath.PROMPTS] += 1
        caches, table = self.kv.caches(layer), self._table(batch, layer)
        tiles = self._cut(batch, tile_q, mixed=True)
        return self._kernels.prompts(query, *caches, table, tiles, self.traits[layer], rotation)

    def _chunks(self, batch: StepBatch, layer: int, query: Tensor) -> Tensor:
        """Compute the attention of the sequences behind, which have several new tokens."""
        caches, table = self.kv.caches(layer), self._table(batch, layer)
        traits, longest, most = self.traits[layer], max(batch.lengths), max(batch.counts)
        self.path_counts[AttentionPath.CHUNK_TRITON] += 1
        heads = 1 << (query.shape[1] // self.kv.num_heads - 1).bit_length()
        wanted = 1 << (most - 1).bit_length()
        tile_q = max(1, _LEAST_ROWS // heads, min(_MOST_ROWS // heads, wanted))
        tiles = self._cut(batch, tile_q)
        return self._kernels.chunks(
            query, *caches, table, tiles, traits, tile_q=tile_q, longest=longest
        )

    def _cut(self, batch: StepBatch, tile_q: int, *, mixed: bool = False) -> tuple[Tensor, ...]:
        """Cut the sequences behind the single tokens into tiles of tokens, one for a program.

        If ``mixed``, and if they are not too many, what takes longest of all sequences begins
        first: programs that take one tile after the other get equal shares then.
        """
        if (tile_q, mixed) in self._tiles:
            return self._tiles[tile_q, mixed]
        tiles: list[tuple[int, int, int, int]] = []
        row = 0
        for at in range(batch.singles, len(batch.counts)):
            count = batch.counts[at]
            first = batch.lengths[at] - count
            for begin in reversed(range(0, count, tile_q)):  # what takes longest begins first
                tiles.append((at, row + begin, min(tile_q, count - begin), first + begin))
            row += count
        if mixed and len(tiles) * self.kv.num_heads <= _MOST_MIXED:
            tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
        columns = [list(column) for column in zip(*tiles, strict=True)]
        self._tiles[tile_q, mixed] = self.staging.stage(columns).columns
        return self._tiles[tile_q, mixed]

    def _table(self, batch: StepBatch, layer: int) -> Tensor:
        """Bring the blocks of every sequence in a group of layers to the device, once a step."""
        group = self.kv.group_of(layer)
        if group not in self._tables:
            first = self.kv.first_id(layer)
            lists = [own[group] for own in batch.block_lists]
            width = max(map(len, lists))
            flat: list[int] = []
            for block_ids in lists:
                flat += [block_id - first for block_id in block_ids]
                flat += [SCRATCH] * (width - len(block_ids))
            self.kv.work_counts[Work.TABLE_ROWS] += len(lists)
            self._tables[group] = self.staging.stage([flat]).columns[0].view(-1, width)
        return self._tables[group]
