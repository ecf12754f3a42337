"""Caches that admit row by row: what finds room is stored, up to the first row that finds none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull

from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class RowWise(PagedCache):
    """It is right. A scheduler would keep the requests from the first refused one on waiting."""

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
        """Count the new blocks that so many tokens take."""
        room = -self.lengths[seq] % self.spec.block_size
        return -(-max(0, count - room) // self.spec.block_size)


class StoresTheRefusedRow(RowWise):
    """26: it has stored a part of the row that finds no room."""

    def needed(self, seq: int, count: int) -> int:
        return min(1, super().needed(seq, count))


class BeginsTheRefusedRow(RowWise):
    """26: it takes a block for the refused row before it finds that it needs a second one."""

    def admit_row(self, seq: int, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.needed(seq, count) > len(self.unused) > 0:
            self.tables.setdefault(seq, []).append(self.unused.pop(0))
        super().admit_row(seq, count, key, value)


class LosesTheRowsBefore(RowWise):
    """It says no before it has looked at a single row."""

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if sum(map(self.needed, seqs, counts)) > len(self.unused):
            raise CacheFull("no room for all rows")
        super().admit(seqs, counts, key, value)


class AdmitsALaterRow(RowWise):
    """It goes on behind the row that found no room, and stores those that need no block."""

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


class SaysNothing(RowWise):
    """It stores the rows that fit, and returns as if it had stored them all."""

    def admit(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        try:
            super().admit(seqs, counts, key, value)
        except CacheFull:
            return


class ClaimsToBeAtomic(RowWise):
    atomic_batches = True
