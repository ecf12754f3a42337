"""Caches that store indexer keys and their scales, and move them with keys and values.

They are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import AuxiliaryVector, KVCacheAdapter, ShardedAdapter
from tests.capabilities.caches.moving_cache import CompactingCache, ForkingCache
from tests.capabilities.caches.swap_cache import SwapCache, Transfer
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.tier_cache import SlotCopy, WriteThroughCache
from tests.capabilities.caches.truncating_caches import CutCache
from tests.capabilities.caches.window_cache import WindowCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec
    from tests.capabilities.caches.window_cache import Slots

KEY, SCALE = "indexer key", "indexer scale"
VECTORS: Mapping[str, AuxiliaryVector] = {
    KEY: AuxiliaryVector(6, "uint8"),
    SCALE: AuxiliaryVector(2),
}
Index = dict[str, torch.Tensor]
"""Indexer keys and scales, ``[layers, blocks, block_size, width]``."""


def new_index(
    spec: CacheSpec, blocks: int, vectors: Mapping[str, AuxiliaryVector] = VECTORS
) -> Index:
    return {
        name: torch.zeros(
            (spec.num_layers, blocks, spec.block_size, each.width),
            dtype=getattr(torch, each.dtype or spec.dtype),
            device=spec.device,
        )
        for name, each in vectors.items()
    }


class Indexing(KVCacheAdapter):
    """A part of caches that takes the vectors of a write one by one."""

    auxiliary_vectors = VECTORS
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4,)
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 1, 3)
    tables: dict[int, list[int]]

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.index = new_index(spec, spec.num_blocks)

    def use_auxiliary_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        self.vectors, self.row = vectors, 0

    def write_index(self, block: int, position: int) -> None:
        """Store the next vectors of the present write."""
        for name, stored in self.index.items():
            stored[:, block, position] = self.vectors[name][:, self.row]
        self.row += 1

    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        length = len(self.peek(seq, layer)[0])
        table = self.tables[seq]
        return {
            name: each[layer, table].flatten(0, 1)[:length] for name, each in self.index.items()
        }


class IndexedCache(Indexing, CutCache):
    """Shares a block until one of its holders writes to it."""

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(block, position, key, value)
        self.write_index(block, position)

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = [row for row, seq in enumerate(seqs) if seq is not None]
        self.vectors = {name: each[:, rows] for name, each in self.vectors.items()}
        self.append([seq for seq in seqs if seq is not None], key[:, rows], value[:, rows])

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        self.copy_index(source, target)

    def copy_index(self, source: int, target: int) -> None:
        for stored in self.index.values():
            stored[:, target] = stored[:, source]


class QuantisedIndex(IndexedCache):
    """Stores indexer keys as bytes, with a scale for each, and reads them back as numbers."""

    auxiliary_vectors: ClassVar = {KEY: AuxiliaryVector(8, of_greatest=1 / 250)}

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        stored = {KEY: AuxiliaryVector(8, "int8"), SCALE: AuxiliaryVector(1)}
        self.index = new_index(spec, spec.num_blocks, stored)

    def write_index(self, block: int, position: int) -> None:
        key = self.vectors[KEY][:, self.row]
        scale = key.abs().amax(-1, keepdim=True) / 127
        self.index[KEY][:, block, position] = (key / scale).round().to(torch.int8)
        self.index[SCALE][:, block, position] = scale
        self.row += 1

    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        stored = super().peek_auxiliary_vectors(seq, layer)
        return {KEY: stored[KEY] * stored[SCALE]}


class IndexedForks(IndexedCache, ForkingCache):
    """Copies a partial block at the fork."""


class IndexedCompaction(IndexedCache, CompactingCache):
    """Moves the last blocks to the first unused ones."""


class IndexedSwaps(IndexedCache, SwapCache):
    """Swaps sequences out and in, and preempts them."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.space_index = new_index(spec, spec.num_blocks)

    def copy_out(self, leaving: Transfer) -> None:
        super().copy_out(leaving)
        self.copy_index_out(leaving)

    def copy_index_out(self, leaving: Transfer) -> None:
        for name, stored in self.index.items():
            self.space_index[name][:, leaving.space] = stored[:, leaving.blocks]

    def copy_in(self, coming: Transfer) -> None:
        super().copy_in(coming)
        self.copy_index_in(coming)

    def copy_index_in(self, coming: Transfer) -> None:
        for name, stored in self.index.items():
            stored[:, coming.blocks] = self.space_index[name][:, coming.space]


class IndexedTexts(Indexing, TextCache):
    """Reuses prefixes."""

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.row = self.first_row()
        super().prefill(seq, key, value)

    def first_row(self) -> int:
        """Return the row of the first token of a prompt that is not found."""
        return self.match_prefix(self.row_tokens[0])

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        for at, token in enumerate(token_ids):
            page, position = divmod(len(self.token_ids.get(seq, ())), self.spec.block_size)
            super().write(seq, [token], key[:, at : at + 1], value[:, at : at + 1])
            self.write_index(self.tables[seq][page], position)


class IndexedTiers(IndexedTexts, WriteThroughCache):
    """Stores blocks in a second tier as soon as they are full."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.second_index = new_index(spec, self.SLOTS)

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        super().copy(copy, arrived)
        blocks, slots = copy.blocks[:arrived], copy.slots[:arrived]
        if copy.ids:
            self.load_index(blocks, slots)
        else:
            self.store_index(blocks, slots)

    def load_index(self, blocks: list[int], slots: list[int]) -> None:
        for name, stored in self.index.items():
            stored[:, blocks] = self.second_index[name][:, slots]

    def store_index(self, blocks: list[int], slots: list[int]) -> None:
        for name, stored in self.index.items():
            self.second_index[name][:, slots] = stored[:, blocks]


class IndexedWindows(Indexing, WindowCache):
    """Has layers of several windows, each with a table of its own."""

    def fill(
        self,
        reservation: tuple[Sequence[int], list[Slots]],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        slots = reservation[1]
        for layer in range(self.spec.num_layers):
            for row, (block, position) in enumerate(self.slots_of(layer, slots)):
                for name, stored in self.index.items():
                    stored[layer, block, position] = self.vectors[name][layer, row]
        super().fill(reservation, key, value)

    def slots_of(self, layer: int, slots: list[Slots]) -> Slots:
        return slots[self.groups.index(self.group_of(layer))]

    def copy(self, layer: int, source: int, target: int) -> None:
        super().copy(layer, source, target)
        for stored in self.index.values():
            stored[layer, target] = stored[layer, source]

    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        size, table = self.spec.block_size, self.group_of(layer).tables[seq]
        start = self.first_live(self.spec.windows[layer], self.lengths[seq])
        places = range(start, self.lengths[seq])
        blocks, positions = [table[at // size] for at in places], [at % size for at in places]
        return {name: each[layer][blocks, positions] for name, each in self.index.items()}


class IndexedRanks(ShardedAdapter):
    """Stores all indexer keys on every rank."""

    of: ClassVar[type[KVCacheAdapter]] = IndexedCache


RIGHT = (
    IndexedCache,
    QuantisedIndex,
    IndexedForks,
    IndexedCompaction,
    IndexedSwaps,
    IndexedTexts,
    IndexedTiers,
    IndexedWindows,
    IndexedRanks,
)
