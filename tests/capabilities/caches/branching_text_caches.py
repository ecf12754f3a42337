"""Caches of texts that branch by forks and truncation: right ones, and broken ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import CacheFull, KVCacheAdapter
from tests.capabilities.caches.text_cache import TextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class BranchingTextCache(TextCache):
    """Shares all blocks with forks; a write or cut within a shared block copies it."""

    truncation = TextCache.truncation.but(copies=True)

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.hold(block)
        self.token_ids[child] = list(self.token_ids[parent])

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        needed, leaving = 0, Counter[int]()
        for seq in seqs:
            table = self.tables.get(seq, [])
            if len(self.token_ids.get(seq, ())) % size == 0:
                needed += 1
            elif self.others(seq, len(table) - 1) > leaving[table[-1]]:
                leaving[table[-1]] += 1
                needed += 1
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for row, (seq, token_ids) in enumerate(zip(seqs, self.row_tokens, strict=True)):
            self.write(seq, token_ids, key[:, row : row + 1], value[:, row : row + 1])

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if len(self.token_ids.get(seq, ())) % self.spec.block_size:
            self.own_last(seq)
        super().write(seq, token_ids, key, value)

    def others(self, seq: int, at: int) -> int:
        """Return the number of other holders of a block of a sequence."""
        return self.holders[self.tables[seq][at]] - 1

    def own_last(self, seq: int) -> None:
        """Give a sequence its last block alone, under no key."""
        table = self.tables[seq]
        last = table[-1]
        if not self.others(seq, len(table) - 1):
            self.forget(last)
            return
        table[-1] = self.open()
        for cache in (self.keys, self.values):
            cache[:, table[-1]] = cache[:, last]
        self.drop(last)

    def forget(self, block: int) -> None:
        self.block_of.pop(self.key_of.pop(block, None), None)

    def truncate(self, seq: int, length: int) -> None:
        size, table = self.spec.block_size, self.tables[seq]
        if length == len(self.token_ids[seq]):
            return
        kept = -(-length // size)
        within = bool(length % size)
        copied = self.truncation.copies and within and self.others(seq, kept - 1) > 0
        given_back = sum(self.holders[block] == 1 for block in table[kept:])
        if copied and not len(self.unused) + given_back:
            raise CacheFull("no block for a copy")
        for block in reversed(table[kept:]):
            self.drop(block)
        del table[kept:], self.token_ids[seq][length:]
        if within:
            self.after_the_cut(seq)

    def after_the_cut(self, seq: int) -> None:
        self.own_last(seq)


class CutsWithoutCopies(BranchingTextCache):
    """Leaves a truncated shared block shared, and findable, until it is written to."""

    truncation = BranchingTextCache.truncation.but(copies=False)

    def after_the_cut(self, seq: int) -> None:
        last = self.tables[seq][-1]
        if not self.others(seq, len(self.tables[seq]) - 1):
            self.forget(last)


RIGHT = (BranchingTextCache, CutsWithoutCopies)


class RegistersTheParentsText(BranchingTextCache):
    """S3: records a fork's tokens in its parent's list, so that its block gets the parent's key.

    Tokens that the other sequence recorded first stay as they are.
    """

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.recorded: dict[int, list[int]] = {}

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.recorded[child] = self.recorded[parent]

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.record = self.recorded.setdefault(seq, [])
        all_said = [*self.token_ids.get(seq, ()), *token_ids]
        self.record += all_said[len(self.record) :]
        super().write(seq, token_ids, key, value)

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        super().register(table, self.record[: len(token_ids)])

    def begin_with(self, found: Any, seq: int) -> int:
        tokens = super().begin_with(found, seq)
        self.recorded[seq] = list(self.token_ids[seq])
        return tokens

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.recorded[seq] = list(self.token_ids[seq])

    def free(self, seq: int) -> None:
        super().free(seq)
        self.recorded.pop(seq, None)


class KeepsKeysOfTruncatedBlocks(BranchingTextCache):
    """S11: finds a truncated block by its old tokens, whatever is written there next."""

    def forget(self, block: int) -> None: ...


class FindsWhatWasCut(BranchingTextCache):
    """Finds a block that a truncation cut, until something else is written there.

    The last token of a text is always computed, so that only a longer text finds the block.
    """

    prefixes = BranchingTextCache.prefixes.but(recomputed_tokens=1)

    def found(self, token_ids: Sequence[int]) -> list[int]:
        return super().found(token_ids[:-1])

    def after_the_cut(self, seq: int) -> None:
        if self.others(seq, len(self.tables[seq]) - 1):
            self.own_last(seq)


class WritesUnderAKeptKey(CutsWithoutCopies):
    """S11: writes to a block that was shared when truncated, and is not now, and keeps its key.

    It has no forks and no lookups: a prompt must find the block to reveal the bug.
    """

    fork: Any = KVCacheAdapter.fork
    match_prefix: Any = KVCacheAdapter.match_prefix
    look_up: Any = KVCacheAdapter.look_up
    begin_with: Any = KVCacheAdapter.begin_with

    def own_last(self, seq: int) -> None:
        if self.others(seq, len(self.tables[seq]) - 1):
            super().own_last(seq)


BROKEN = (
    RegistersTheParentsText,
    KeepsKeysOfTruncatedBlocks,
    FindsWhatWasCut,
    WritesUnderAKeptKey,
)
