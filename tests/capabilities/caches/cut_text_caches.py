"""Caches of texts that write and cut several sequences in one call: right and broken ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.branching_text_caches import BranchingTextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class CutTextCache(BranchingTextCache):
    """Stores several tokens of each sequence at once, and cuts several sequences: all or none."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many(seqs, [1] * len(seqs), key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        needed = self.blocks_needed(seqs, counts)
        if needed > len(self.unused):
            self.refuse(needed)
        begin = 0
        for seq, count, token_ids in zip(seqs, counts, self.row_tokens, strict=True):
            end = begin + count
            self.write(seq, token_ids, key[:, begin:end], value[:, begin:end])
            begin = end

    def blocks_needed(self, seqs: Sequence[int], counts: Sequence[int]) -> int:
        """Return the number of new blocks for a write, copies of shared last blocks included."""
        size, needed, leaving = self.spec.block_size, 0, Counter[int]()
        for seq, count in zip(seqs, counts, strict=True):
            table, stored = self.tables.get(seq, []), len(self.token_ids.get(seq, ()))
            needed += -(-(stored + count) // size) - len(table)
            if stored % size and self.others(seq, len(table) - 1) > leaving[table[-1]]:
                leaving[table[-1]] += 1
                needed += 1
        return needed

    def refuse(self, needed: int) -> None:
        raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        if self.lacks_blocks(seqs, lengths):
            raise CacheFull("no block for a copy")
        for seq, length in zip(seqs, lengths, strict=True):
            super().truncate(seq, length)

    def lacks_blocks(self, seqs: Sequence[int], lengths: Sequence[int]) -> bool:
        """Return True if some sequence finds no block for its copy."""
        return min(self.unused_after_each_cut(seqs, lengths), default=0) < 0

    def unused_after_each_cut(self, seqs: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the number of unused blocks after each cut, below 0 where a copy lacks one."""
        size, unused, holders = self.spec.block_size, len(self.unused), self.holders.copy()
        after = []
        for seq, length in zip(seqs, lengths, strict=True):
            kept = -(-length // size)
            for block in self.tables[seq][kept:]:
                holders[block] -= 1
                unused += not holders[block]
            last = self.tables[seq][kept - 1] if length % size else None
            if last is not None and length < len(self.token_ids[seq]) and holders[last] > 1:
                holders[last] -= 1
                unused -= 1
            after.append(unused)
        return after


RIGHT = (CutTextCache,)


class EvictsBeforeARefusal(CutTextCache):
    """Evicts all cached blocks to make room for an append, and then refuses it."""

    def refuse(self, needed: int) -> None:
        for block in self.unused:
            self.forget(block)
        super().refuse(needed)


class CountsRoomOfLaterCuts(CutTextCache):
    """Copies a block in the room that only later cuts of the same call would make."""

    def lacks_blocks(self, seqs: Sequence[int], lengths: Sequence[int]) -> bool:
        return self.unused_after_each_cut(seqs, lengths)[-1:] < [0]


BROKEN = (EvictsBeforeARefusal, CountsRoomOfLaterCuts)
