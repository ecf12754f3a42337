"""Caches that merge equal blocks after they were stored: a right one, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class MergesLater(TextCache):
    """Merges a full block with an equal one when another sequence writes next. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.unmerged: set[tuple[int, int]] = set()
        """Sequences, and indices of their blocks that others may equal."""

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        self.merge(seqs)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().prefill(seq, key, value)
        self.merge([seq])

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        key = self.key(token_ids)
        other = self.block_of.setdefault(key, table[-1])
        if other == table[-1]:
            self.key_of[other] = key
        else:
            (seq,) = (seq for seq, own in self.tables.items() if own is table)
            self.unmerged.add((seq, len(table) - 1))

    def merge(self, later: Sequence[int]) -> None:
        """Merge the blocks of all sequences but those in ``later``."""
        for seq, at in sorted(self.unmerged):
            if seq in later:
                continue
            self.unmerged.remove((seq, at))
            self.merge_block(seq, at)

    def merge_block(self, seq: int, at: int) -> None:
        table, key = self.tables[seq], self.key_at(seq, at)
        other = self.block_of[key]
        if other != table[at]:
            self.hold(other)
            self.drop(table[at])
            table[at] = other

    def key_at(self, seq: int, at: int) -> Hashable:
        return self.key(self.token_ids[seq][: (at + 1) * self.spec.block_size])

    def open(self) -> int:
        """Take a block; one that equals an evicted block is found in its place."""
        block = super().open()
        for seq, at in sorted(self.unmerged):
            key, own = self.key_at(seq, at), self.tables[seq][at]
            if self.block_of.setdefault(key, own) == own:
                self.key_of[own] = key
        return block

    def free(self, seq: int) -> None:
        self.unmerged = {each for each in self.unmerged if each[0] != seq}
        super().free(seq)


class MergesWithAStaleBlock(MergesLater):
    """S19: merges with the block that was equal when its own was stored, whatever it holds now."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.equal: dict[tuple[int, int], int] = {}

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        before = set(self.unmerged)
        super().register(table, token_ids)
        self.equal |= dict.fromkeys(self.unmerged - before, self.block_of[self.key(token_ids)])

    def merge_block(self, seq: int, at: int) -> None:
        table, other = self.tables[seq], self.equal.pop((seq, at))
        if other != table[at]:
            self.hold(other)
            self.drop(table[at])
            table[at] = other


class MergesWithoutHolding(MergesLater):
    """S19: merges with an equal block without becoming a holder of it."""

    def merge_block(self, seq: int, at: int) -> None:
        table, other = self.tables[seq], self.block_of[self.key_at(seq, at)]
        if other != table[at]:
            self.drop(table[at])
            table[at] = other


BROKEN = (MergesWithAStaleBlock, MergesWithoutHolding)
