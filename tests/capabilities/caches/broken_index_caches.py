"""Caches that move keys and values right, and indexer keys or their scales wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer import ShardedAdapter
from tests.capabilities.caches.index_cache import (
    KEY,
    SCALE,
    IndexedCache,
    IndexedCompaction,
    IndexedForks,
    IndexedSwaps,
    IndexedTexts,
    IndexedTiers,
    IndexedWindows,
    QuantisedIndex,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec, KVCacheAdapter
    from tests.capabilities.caches.swap_cache import Transfer
    from tests.capabilities.caches.window_cache import Slots


class CopiesNoIndexerKeys(IndexedCache):
    """T22: copies keys and values without indexer keys in copy-on-write."""

    def copy_index(self, source: int, target: int) -> None:
        """Do nothing."""


class CopiesIndexerKeysWithoutScales(IndexedCache):
    """T22: copies indexer keys without their scales in copy-on-write."""

    def copy_index(self, source: int, target: int) -> None:
        self.index[KEY][:, target] = self.index[KEY][:, source]


class ReadsIndexerKeysWithFormerScales(QuantisedIndex):
    """T22: copies the codes of indexer keys without their scales in copy-on-write."""

    copy_index = CopiesIndexerKeysWithoutScales.copy_index


class ForksWithoutIndexerKeys(IndexedForks):
    """T22: copies the partial block of a fork without its indexer keys."""

    copy_index = CopiesNoIndexerKeys.copy_index


class CompactsWithoutIndexerScales(IndexedCompaction):
    """T22: moves blocks without the scales of their indexer keys."""

    copy_index = CopiesIndexerKeysWithoutScales.copy_index


class GoesOnAfterATruncation(IndexedCache):
    """Stores indexer keys after those of truncated tokens, at positions of their own."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.written: Counter[int] = Counter()
        """Number of tokens that each sequence ever got in its last block."""

    def slot(self, seq: int, copies: list[tuple[int, int]]) -> tuple[int, int]:
        block, position = super().slot(seq, copies)
        self.written[seq] = self.written[seq] + 1 if position else 1
        return block, position

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.written[child] = self.written[parent]

    def write_index(self, block: int, position: int) -> None:
        (seq, *_) = (seq for seq, table in self.tables.items() if table[-1:] == [block])
        super().write_index(block, max(position, min(self.written[seq], self.spec.block_size) - 1))


class SwapsOutWithoutIndexerKeys(IndexedSwaps):
    """T22: swaps out keys and values without indexer keys."""

    def copy_index_out(self, leaving: Transfer) -> None:
        """Do nothing."""


class SwapsInWithoutIndexerScales(IndexedSwaps):
    """T22: swaps in indexer keys without their scales."""

    def copy_index_in(self, coming: Transfer) -> None:
        self.index[KEY][:, coming.blocks] = self.space_index[KEY][:, coming.space]


class ResumesWithoutIndexerKeys(IndexedSwaps):
    """Writes the keys and values of a preempted sequence again, and no indexer keys."""

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        index = {name: each.clone() for name, each in self.index.items()}
        super().resume(seq, key, value)
        self.index = index


class IndexesAFoundPrefixAgain(IndexedTexts):
    """Stores the first indexer keys of a prompt for the tokens after a prefix that is found."""

    def first_row(self) -> int:
        return 0


class StoresWithoutIndexerKeys(IndexedTiers):
    """T22: stores blocks in a second tier without their indexer keys."""

    def store_index(self, blocks: list[int], slots: list[int]) -> None:
        """Do nothing."""


class LoadsWithoutIndexerScales(IndexedTiers):
    """T22: loads blocks from a second tier without the scales of their indexer keys."""

    def load_index(self, blocks: list[int], slots: list[int]) -> None:
        self.index[KEY][:, blocks] = self.second_index[KEY][:, slots]


class IndexesInOneTable(IndexedWindows):
    """Stores the indexer keys of all layers in the blocks of the first layer's table."""

    def slots_of(self, layer: int, slots: list[Slots]) -> Slots:  # noqa: ARG002
        return super().slots_of(0, slots)


class WithoutAnIndex(IndexedCache):
    def write_index(self, block: int, position: int) -> None:
        """Do nothing."""


class IndexesOnTheFirstRank(ShardedAdapter):
    """Stores indexer keys on the first rank only."""

    of = IndexedCache

    def rank(self, at: int) -> KVCacheAdapter:
        return WithoutAnIndex() if at else IndexedCache()


class IndexesPaddingRows(IndexedCache):
    """Takes the indexer keys of a padded batch row by row, those of padding included."""

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = [row for row, seq in enumerate(seqs) if seq is not None]
        self.append([seq for seq in seqs if seq is not None], key[:, rows], value[:, rows])


class KeepsFormerScales(IndexedCache):
    """T22: keeps the scale that a position of a block had for its former holder."""

    def write_index(self, block: int, position: int) -> None:
        former = self.index[SCALE][:, block, position].clone()
        super().write_index(block, position)
        if former.any():
            self.index[SCALE][:, block, position] = former


class IndexesLayersAsOne(IndexedCache):
    """Stores the indexer keys of the last layer for all layers."""

    def write_index(self, block: int, position: int) -> None:
        super().write_index(block, position)
        self.index[KEY][:, block, position] = self.index[KEY][-1, block, position].clone()


class KeepsTheVectorsOfAWrite(IndexedCache):
    """Keeps the tensor of a write as the indexer keys of a sequence's last token."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def write_index(self, block: int, position: int) -> None:
        self.kept[block, position] = self.vectors[KEY][:, self.row]
        super().write_index(block, position)

    def peek_auxiliary_vectors(self, seq: int, layer: int) -> Mapping[str, torch.Tensor]:
        vectors = dict(super().peek_auxiliary_vectors(seq, layer))
        page, position = divmod(self.lengths[seq] - 1, self.spec.block_size)
        if self.lengths[seq]:
            place = self.tables[seq][page], position
            vectors[KEY] = torch.cat([vectors[KEY][:-1], self.kept[place][layer][None]])
        return vectors


BROKEN = (
    CopiesNoIndexerKeys,
    CopiesIndexerKeysWithoutScales,
    ReadsIndexerKeysWithFormerScales,
    ForksWithoutIndexerKeys,
    CompactsWithoutIndexerScales,
    GoesOnAfterATruncation,
    SwapsOutWithoutIndexerKeys,
    SwapsInWithoutIndexerScales,
    ResumesWithoutIndexerKeys,
    IndexesAFoundPrefixAgain,
    StoresWithoutIndexerKeys,
    LoadsWithoutIndexerScales,
    IndexesInOneTable,
    IndexesOnTheFirstRank,
    IndexesPaddingRows,
    KeepsFormerScales,
    IndexesLayersAsOne,
    KeepsTheVectorsOfAWrite,
)
