"""Caches on several ranks: right ones, and ones whose ranks differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull, KVCacheAdapter, ShardedAdapter

from .paged_cache import PagedCache
from .quantised_caches import Int8Blocks
from .state_cache import StateCache
from .text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class PagedRanks(ShardedAdapter):
    of = PagedCache
    head_dims = (4, 1)
    block_sizes = (4, 1, 2)


class TextRanks(ShardedAdapter):
    of = TextCache
    ranks = 3


class Int8Ranks(ShardedAdapter):
    of = Int8Blocks
    head_dims = (4, 1)


class StateRanks(ShardedAdapter):
    of = StateCache
    head_dims = (4, 1)


class OneBlockLess(PagedCache):
    def make(self, spec: CacheSpec) -> None:
        super().make(replace(spec, num_blocks=spec.num_blocks - 1))


class HasFewerBlocks(PagedRanks):
    """S17: each rank computes the number of its blocks for itself."""

    def rank(self, at: int) -> KVCacheAdapter:
        return OneBlockLess() if at else PagedCache()


class WithoutBooks(PagedCache):
    ledger = KVCacheAdapter.ledger
    table = KVCacheAdapter.table  # type: ignore[assignment]
    arena = KVCacheAdapter.arena


class OneBlockLessWithoutBooks(OneBlockLess):
    ledger = KVCacheAdapter.ledger
    table = KVCacheAdapter.table  # type: ignore[assignment]
    arena = KVCacheAdapter.arena


class HasFewerBlocksUnseen(ShardedAdapter):
    """S17: does the same, and shows no rank's books."""

    of = WithoutBooks
    head_dims = (4, 1)
    block_sizes = (4, 1, 2)

    def rank(self, at: int) -> KVCacheAdapter:
        return OneBlockLessWithoutBooks() if at else WithoutBooks()


class KeepsOneBlockBack(PagedCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        opening = [seq for seq in seqs if self.lengths[seq] % self.spec.block_size == 0]
        if opening and len(opening) >= len(self.unused):
            raise CacheFull("no room")
        super().append(seqs, key, value)


class RefusesAlone(PagedRanks):
    """S17: rank 1 refuses a step that fits."""

    def rank(self, at: int) -> KVCacheAdapter:
        return KeepsOneBlockBack() if at else PagedCache()


class FreesToTheFront(PagedCache):
    def free(self, seq: int) -> None:
        self.unused[:0] = self.tables.pop(seq)
        del self.lengths[seq]


class FreesInAnotherOrder(PagedRanks):
    """S17: the ranks reuse freed blocks in different orders."""

    def rank(self, at: int) -> KVCacheAdapter:
        return FreesToTheFront() if at else PagedCache()


class EvictsTheNewest(TextCache):
    def open(self) -> int:
        self.unused.reverse()
        block = super().open()
        self.unused.reverse()
        return block


class EvictsInAnotherOrder(TextRanks):
    """S17: rank 2 evicts another text than the other ranks."""

    def rank(self, at: int) -> KVCacheAdapter:
        return EvictsTheNewest() if at == 2 else TextCache()


class KeepsOneBuffer(PagedRanks):
    """All ranks of a process write to the storage of the first rank."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        first, second = self.caches
        assert isinstance(first, PagedCache)
        assert isinstance(second, PagedCache)
        second.keys = first.keys


class WritesTheHeadsOfAnother(PagedRanks):
    """A rank gets the values of the other rank's heads."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value.roll(value.shape[2] // self.ranks, 2))


class LoadsTheStateOfOneRank(StateRanks):
    """T6: takes a rank's shard of a checkpoint for the state that all ranks have."""

    def begin_with(self, prefix: Any, seq: int) -> int:
        found = super().begin_with(prefix, seq)
        first, *others = (each.stored[seq] for each in self.caches if isinstance(each, StateCache))
        for stored in others:
            stored.state = first.state
        return found


RIGHT = (PagedRanks, TextRanks, Int8Ranks, StateRanks)
BROKEN = {
    HasFewerBlocks: "rank 1, layer 0: there are ",
    HasFewerBlocksUnseen: "rank 1 raised CacheFull",
    RefusesAlone: "1 of 2 ranks raised nothing",
    FreesInAnotherOrder: "rank 1, layer 0: block ",
    EvictsInAnotherOrder: "rank 2, layer 0: block ",
    KeepsOneBuffer: "peek: sequence ",
    WritesTheHeadsOfAnother: "peek: sequence ",
    LoadsTheStateOfOneRank: "peek_state: sequence ",
}
"""Broken caches, each with the beginning of its failure."""
