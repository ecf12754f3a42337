"""A paged cache that shares blocks and truncates without copying, and ways to get that wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CutCache(KVCacheAdapter):
    """A block stays shared until a sequence that is not alone on it writes to it. It is right."""

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
        books = list(self.unused), self.holders.copy(), dict(self.tables), self.lengths.copy()
        copies: list[tuple[int, int]] = []
        try:
            slots = [self.slot(seq, copies) for seq in seqs]
        except CacheFull:
            self.unused, self.holders, self.tables, self.lengths = books
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


class GivesNothingBack(CutCache):
    """S11, too few: what was rolled back stays in the table."""

    def keep(self, seq: int, blocks: int) -> None:
        """Keep them all."""


class GivesBackTheLastBlockToo(CutCache):
    """S11, too many: a block of which a part is kept is given back."""

    def blocks_of(self, length: int) -> int:
        return length // self.spec.block_size


class KeepsABlockAtTheEdge(CutCache):
    """A cut at a block's end leaves the block behind it."""

    def blocks_of(self, length: int) -> int:
        return length // self.spec.block_size + 1


class FreesUnderOthers(CutCache):
    """Blocks that are cut off are free, whoever else holds them."""

    def keep(self, seq: int, blocks: int) -> None:
        for block in self.tables[seq][blocks:]:
            self.holders[block] = 0
            self.unused.append(block)
        self.tables[seq] = self.tables[seq][:blocks]


class KeepsTheCount(CutCache):
    """A cut within the last block is forgotten."""

    def truncate(self, seq: int, length: int) -> None:
        if self.blocks_of(length) < len(self.tables[seq]):
            super().truncate(seq, length)


class WritesToASharedBlock(CutCache):
    """A sequence that was cut thinks that it is alone on its last block."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.cut: set[int] = set()

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.cut.add(seq)

    def must_copy(self, seq: int) -> bool:
        return seq not in self.cut and super().must_copy(seq)


class CutsTheParentToo(CutCache):
    """A block has one fill count, which the sequences that share the block all see."""

    def truncate(self, seq: int, length: int) -> None:
        last = self.tables[seq][-1:]
        for other, table in self.tables.items():
            if last and table[-1:] == last:
                self.lengths[other] = min(self.lengths[other], length)
        super().truncate(seq, length)


class CannotTrim(Exception):
    """The state holds more than the tokens that are left."""


class StateCache(CutCache):
    """A cache that cannot be cut any more once it holds more than a block. It is right."""

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
    """S12: it cuts the tokens, and the state is not that of what is left."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Refuse nothing."""


class TrimsBeforeItRefuses(StateCache):
    """S12: blocks are given back before it is found out that they must not be."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        try:
            super().refuse(seqs, lengths)
        except CannotTrim:
            self.keep(seqs[0], self.blocks_of(lengths[0]))
            raise


class CutsTheFirstOfABatch(StateCache):
    """S12: a batch of which a later row is refused has cut the rows before it."""

    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        for seq, length in zip(seqs, lengths, strict=True):
            super().truncate_many([seq], [length])


class RefusesWhatItCould(StateCache):
    """It refuses whatever it is asked to cut."""

    def refuse(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:  # noqa: ARG002
        raise CannotTrim


RIGHT = (CutCache, StateCache)
BROKEN = (
    GivesNothingBack,
    GivesBackTheLastBlockToo,
    KeepsABlockAtTheEdge,
    FreesUnderOthers,
    KeepsTheCount,
    WritesToASharedBlock,
    CutsTheParentToo,
    TrimsAnyState,
    TrimsBeforeItRefuses,
    CutsTheFirstOfABatch,
    RefusesWhatItCould,
)
