"""A paged cache with forks that truncates without copies, and broken variants."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CutCache(KVCacheAdapter):
    """Shares a block until one of its holders writes to it. It is right."""

    dtypes: ClassVar[Sequence[str]] = ("float32",)

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
        self.keys = torch.zeros(shape, device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.unused = list(range(spec.num_blocks))
        self.holders: Counter[int] = Counter()
        self.tables: dict[int, list[int]] = {}
        self.lengths: Counter[int] = Counter()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        previous = list(self.unused), self.holders.copy(), dict(self.tables), self.lengths.copy()
        copies: list[tuple[int, int]] = []
        try:
            slots = [self.slot(seq, copies) for seq in seqs]
        except CacheFull:
            self.unused, self.holders, self.tables, self.lengths = previous
            raise
        for source, target in copies:
            self.copy(source, target)
        for row, (block, position) in enumerate(slots):
            self.write(block, position, key[:, row], value[:, row])

    def copy(self, source: int, target: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target] = cache[:, source]

    def write(self, block: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one token, ``[layers, heads, head_dim]``."""
        for cache, new in zip((self.keys, self.values), (key, value), strict=True):
            cache[:, block, :, position] = new

    def slot(self, seq: int, copies: list[tuple[int, int]]) -> tuple[int, int]:
        table = self.tables[seq] = list(self.tables.get(seq, ()))
        position = self.lengths[seq] % self.spec.block_size
        self.lengths[seq] += 1
        if position == 0:
            table.append(self.take())
        elif self.must_copy(seq):
            copies.append((table[-1], self.take()))
            self.drop(table[-1:])
            table[-1] = copies[-1][1]
        return table[-1], position

    def must_copy(self, seq: int) -> bool:
        return self.holders[self.tables[seq][-1]] > 1

    def take(self) -> int:
        if not self.unused:
            raise CacheFull
        block = self.unused.pop()
        self.holders[block] = 1
        return block

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused.append(block)

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        self.holders.update(self.tables[child])

    def free(self, seq: int) -> None:
        self.drop(self.tables.pop(seq))
        del self.lengths[seq]

    def truncate(self, seq: int, length: int) -> None:
        self.lengths[seq] = length
        self.keep(seq, self.blocks_of(length))

    def blocks_of(self, length: int) -> int:
        return -(-length // self.spec.block_size)

    def keep(self, seq: int, blocks: int) -> None:
        self.drop(self.tables[seq][blocks:])
        self.tables[seq] = self.tables[seq][:blocks]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            cache[layer, self.tables[seq]].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        return Ledger(dict(self.holders), self.unused, self.spec.num_blocks)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class KeepsTruncatedBlocks(CutCache):
    """S11, too few: keeps truncated blocks in the table."""

    def keep(self, seq: int, blocks: int) -> None:
        """Do nothing."""


class FreesTheLastBlockToo(CutCache):
    """S11, too many: frees a block of which a part is kept."""

    def blocks_of(self, length: int) -> int:
        return length // self.spec.block_size


class KeepsABlockAtTheEdge(CutCache):
    """Keeps the block after a cut at a block's end."""

    def blocks_of(self, length: int) -> int:
        return length // self.spec.block_size + 1


class FreesUnderOthers(CutCache):
    """Frees truncated blocks, whoever else holds them."""

    def keep(self, seq: int, blocks: int) -> None:
        for block in self.tables[seq][blocks:]:
            self.holders[block] = 0
            self.unused.append(block)
        self.tables[seq] = self.tables[seq][:blocks]


class KeepsTheCount(CutCache):
    """Ignores a cut within the last block."""

    def truncate(self, seq: int, length: int) -> None:
        if self.blocks_of(length) < len(self.tables[seq]):
            super().truncate(seq, length)


class WritesToASharedBlock(CutCache):
    """Takes a truncated sequence for the only holder of its last block."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.truncated: set[int] = set()

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.truncated.add(seq)

    def must_copy(self, seq: int) -> bool:
        return seq not in self.truncated and super().must_copy(seq)


class CutsTheParentToo(CutCache):
    """Has one fill count per block, which all of its holders see."""

    def truncate(self, seq: int, length: int) -> None:
        last = self.tables[seq][-1:]
        for other, table in self.tables.items():
            if last and table[-1:] == last:
                self.lengths[other] = min(self.lengths[other], length)
        super().truncate(seq, length)


class CannotTrim(Exception):
    """A state holds more tokens than would be left."""


class StateCache(CutCache):
    """Cannot be truncated once it holds more than a block. It is right."""

    truncation = CutCache.truncation.but(errors=(CannotTrim,))

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        return length == stored or stored <= spec.block_size

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            if not self.can_truncate(self.spec, self.lengths[seq], length):
                raise CannotTrim

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        self.refuse(seqs, lengths)
        for seq, length in zip(seqs, lengths, strict=True):
            super().truncate(seq, length)


class TrimsAnyState(StateCache):
    """S12: truncates the tokens, and not the state."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Do nothing."""


class TrimsBeforeItRefuses(StateCache):
    """S12: frees blocks before it refuses a truncation."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        try:
            super().refuse(seqs, lengths)
        except CannotTrim:
            self.keep(seqs[0], self.blocks_of(lengths[0]))
            raise


class TruncatesRowsBeforeARefusal(StateCache):
    """S12: truncates the rows before a refused one."""

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            super().truncate_many([seq], [length])


class RefusesEveryTruncation(StateCache):
    """Refuses every truncation."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:  # noqa: ARG002
        raise CannotTrim


class CopiesAtTheCut(CutCache):
    """Copies the kept part of a shared block at once, and truncates all sequences or none.

    It is right.
    """

    truncation = CutCache.truncation.but(copies=True)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.blocks_of(key.shape[1]) > len(self.unused):
            raise CacheFull
        for at in range(key.shape[1]):
            self.append([seq], key[:, at : at + 1], value[:, at : at + 1])

    def truncate(self, seq: int, length: int) -> None:
        self.truncate_many([seq], [length])

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        if self.lacks_blocks(seqs, lengths):
            raise CacheFull
        for seq, length in zip(seqs, lengths, strict=True):
            copies = self.copies_last(seq, length)
            super().truncate(seq, length)
            if copies:
                table = self.tables[seq]
                own = self.take()
                self.copy(table[-1], own)
                self.drop(table[-1:])
                table[-1] = own

    def copies_last(self, seq: int, length: int) -> bool:
        """Return True if a cut is within a block, which the sequence must not share any more."""
        if length == self.lengths[seq] or not length % self.spec.block_size:
            return False
        return self.holders[self.tables[seq][self.blocks_of(length) - 1]] > 1

    def lacks_blocks(self, seqs: Sequence[int], lengths: Sequence[int]) -> bool:
        """Return True if some sequence finds no block for its copy."""
        unused, holders = len(self.unused), self.holders.copy()
        for seq, length in zip(seqs, lengths, strict=True):
            kept = self.blocks_of(length)
            for block in self.tables[seq][kept:]:
                holders[block] -= 1
                unused += self.is_unused(block, holders[block])
            if self.copies_last(seq, length):
                last = self.tables[seq][kept - 1]
                copies = holders[last] > 1
                holders[last] -= copies
                unused -= copies
            if unused < 0:
                return True
        return False

    def is_unused(self, block: int, holders: int) -> bool:  # noqa: ARG002
        """Return True for a block without holders after the cuts so far."""
        return not holders


class CountsABlockOfTwoAsFree(CopiesAtTheCut):
    """Counts a block as free as soon as the first of two sequences is cut off it."""

    def is_unused(self, block: int, holders: int) -> bool:
        return holders == self.holders[block] - 1


class MissesABlockOfTwo(CopiesAtTheCut):
    """Does not count a block as free that two sequences leave in one call."""

    def is_unused(self, block: int, holders: int) -> bool:  # noqa: ARG002
        return self.holders[block] == 1


RIGHT = (CutCache, StateCache, CopiesAtTheCut)
BROKEN = (
    KeepsTruncatedBlocks,
    FreesTheLastBlockToo,
    KeepsABlockAtTheEdge,
    FreesUnderOthers,
    KeepsTheCount,
    WritesToASharedBlock,
    CutsTheParentToo,
    TrimsAnyState,
    TrimsBeforeItRefuses,
    TruncatesRowsBeforeARefusal,
    RefusesEveryTruncation,
    CountsABlockOfTwoAsFree,
    MissesABlockOfTwo,
)
