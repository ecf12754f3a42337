"""Caches that admit row by row: they store rows up to the first one without room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class RowWise(PagedCache):
    """Admits row by row; a scheduler would make the first refused request and later ones wait."""

    atomic_batches = False
    conditions = (*PagedCache.conditions, "out_of_room_mid_batch", "name_used_again")

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.admit(seqs, [1] * len(seqs), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.admit(seqs, counts, key, value)

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        begin = 0
        for seq, count in zip(seqs, counts, strict=True):
            tokens = slice(begin, begin + count)
            begin += count
            self.admit_row(seq, count, key[:, tokens], value[:, tokens])

    def admit_row(self, seq: int, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.needed(seq, count) > len(self.unused):
            raise CacheFull(f"no room for {count} tokens of sequence {seq}")
        for at in range(count):
            super().append([seq], key[:, at : at + 1], value[:, at : at + 1])

    def needed(self, seq: int, count: int) -> int:
        """Return the number of new blocks that ``count`` tokens need."""
        room = -self.lengths[seq] % self.spec.block_size
        return -(-max(0, count - room) // self.spec.block_size)


class StoresTheRefusedRow(RowWise):
    """26: stores a part of the refused row."""

    def needed(self, seq: int, count: int) -> int:
        return min(1, super().needed(seq, count))


class BeginsTheRefusedRow(RowWise):
    """26: takes one block for a refused row that needs two."""

    def admit_row(self, seq: int, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.needed(seq, count) > len(self.unused) > 0:
            self.tables.setdefault(seq, []).append(self.unused.pop(0))
        super().admit_row(seq, count, key, value)


class RefusesTheWholeBatch(RowWise):
    """Refuses a batch before it stores any row."""

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if sum(map(self.needed, seqs, counts)) > len(self.unused):
            raise CacheFull("no room for all rows")
        super().admit(seqs, counts, key, value)


class AdmitsALaterRow(RowWise):
    """Stores rows after the refused one if they need no block."""

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        begin, refused = 0, None
        for seq, count in zip(seqs, counts, strict=True):
            tokens = slice(begin, begin + count)
            begin += count
            try:
                self.admit_row(seq, count, key[:, tokens], value[:, tokens])
            except CacheFull as error:
                refused = error
        if refused:
            raise refused


class ReturnsWithoutRefusing(RowWise):
    """Stores the rows that fit, and returns as if all were stored."""

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        try:
            super().admit(seqs, counts, key, value)
        except CacheFull:
            return


class ClaimsToBeAtomic(RowWise):
    atomic_batches = True
