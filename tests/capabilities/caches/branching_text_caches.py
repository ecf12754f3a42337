"""Caches of texts that fork and are cut, so that texts branch: right ones, and wrong ones."""

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
    """A fork shares all blocks; whoever writes into a shared one, or cuts it, gets a copy."""

    truncation = TextCache.truncation.but(copies=True)

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        for block in self.tables[child]:
            self.hold(block)
        self.said[child] = list(self.said[parent])

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        needed, leaving = 0, Counter[int]()
        for seq in seqs:
            table = self.tables.get(seq, [])
            if len(self.said.get(seq, ())) % size == 0:
                needed += 1
            elif self.others(seq, len(table) - 1) > leaving[table[-1]]:
                leaving[table[-1]] += 1
                needed += 1
        if needed > len(self.unused):
            raise CacheFull(f"{needed} blocks needed, {len(self.unused)} free")
        for row, (seq, said) in enumerate(zip(seqs, self.row_tokens, strict=True)):
            self.write(seq, said, key[:, row : row + 1], value[:, row : row + 1])

    def write(self, seq: int, said: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if len(self.said.get(seq, ())) % self.spec.block_size:
            self.own_last(seq)
        super().write(seq, said, key, value)

    def others(self, seq: int, at: int) -> int:
        """Count who has a block of a sequence besides."""
        return self.holders[self.tables[seq][at]] - 1

    def own_last(self, seq: int) -> None:
        """Leave a sequence alone in its last block, which nobody can find any more."""
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
        if length == len(self.said[seq]):
            return
        kept = -(-length // size)
        within = bool(length % size)
        copied = self.truncation.copies and within and self.others(seq, kept - 1) > 0
        given_back = sum(self.holders[block] == 1 for block in table[kept:])
        if copied and not len(self.unused) + given_back:
            raise CacheFull("no block for a copy")
        for block in reversed(table[kept:]):
            self.drop(block)
        del table[kept:], self.said[seq][length:]
        if within:
            self.after_the_cut(seq)

    def after_the_cut(self, seq: int) -> None:
        self.own_last(seq)


class CutsWithoutCopies(BranchingTextCache):
    """A shared block that is cut stays shared, and stays known, until it is written to."""

    truncation = BranchingTextCache.truncation.but(copies=False)

    def after_the_cut(self, seq: int) -> None:
        last = self.tables[seq][-1]
        if not self.others(seq, len(self.tables[seq]) - 1):
            self.forget(last)


RIGHT = (BranchingTextCache, CutsWithoutCopies)


class RegistersTheParentsText(BranchingTextCache):
    """S3: a fork notes what it says where its parent does, so that its block gets the other's key.

    What stands there already, because the other one wrote first, is left as it is.
    """

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.notes: dict[int, list[int]] = {}

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.notes[child] = self.notes[parent]

    def write(self, seq: int, said: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.noted = self.notes.setdefault(seq, [])
        all_said = [*self.said.get(seq, ()), *said]
        self.noted += all_said[len(self.noted) :]
        super().write(seq, said, key, value)

    def register(self, table: list[int], said: Sequence[int]) -> None:
        super().register(table, self.noted[: len(said)])

    def begin_with(self, found: Any, seq: int) -> int:
        tokens = super().begin_with(found, seq)
        self.notes[seq] = list(self.said[seq])
        return tokens

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.notes[seq] = list(self.said[seq])

    def free(self, seq: int) -> None:
        super().free(seq)
        self.notes.pop(seq, None)


class KeepsTheKeyOfWhatWasCut(BranchingTextCache):
    """S11: a block that is cut is still found with what it held, whatever is written there next."""

    def forget(self, block: int) -> None: ...


class WritesUnderAKeptKey(CutsWithoutCopies):
    """S11: who was cut in a block of two, and then has it alone, writes there and keeps its key.

    Nothing is forked or looked up: a prompt must find the block to show it.
    """

    fork: Any = KVCacheAdapter.fork
    match_prefix: Any = KVCacheAdapter.match_prefix
    look_up: Any = KVCacheAdapter.look_up
    begin_with: Any = KVCacheAdapter.begin_with

    def own_last(self, seq: int) -> None:
        if self.others(seq, len(self.tables[seq]) - 1):
            super().own_last(seq)


BROKEN = (RegistersTheParentsText, KeepsTheKeyOfWhatWasCut, WritesUnderAKeptKey)
