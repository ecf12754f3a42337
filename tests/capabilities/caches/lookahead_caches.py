"""Caches whose tables have blocks for tokens to come: right ones, and broken ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LookaheadCache(CutCache):
    """Holds two more blocks for each sequence that is written to, or refuses the write.

    It is right.
    """

    lookahead_blocks = 2
    head_counts = (1, 2)
    head_dims = (4,)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        rows = zip(seqs, counts, strict=True)
        self.append([seq for seq, count in rows for _ in range(count)], key, value)

    def slot(self, seq: int, copies: list[tuple[int, int]]) -> tuple[int, int]:
        self.tables[seq] = list(self.tables.get(seq, ()))
        at, position = divmod(self.lengths[seq], self.spec.block_size)
        self.lengths[seq] += 1
        if at == len(self.tables[seq]):
            new = self.take()
            self.tables[seq].append(new)
        elif position and self.holders[shared := self.tables[seq][at]] > 1:
            new = self.take()
            copies.append((shared, new))
            self.drop([shared])
            self.tables[seq][at] = new
        self.look_ahead(seq)
        return self.tables[seq][at], position

    def look_ahead(self, seq: int) -> None:
        while len(self.tables[seq]) < self.most_blocks(self.lengths[seq]):
            self.tables[seq].append(self.take())

    def most_blocks(self, length: int) -> int:
        """Return the most blocks that a sequence of this length may have."""
        return self.blocks_of(length) + self.lookahead_blocks

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = self.tables[parent][: self.blocks_of(self.lengths[parent])]
        self.lengths[child] = self.lengths[parent]
        self.holders.update(self.tables[child])

    def truncate(self, seq: int, length: int) -> None:
        """Keep the blocks of the next drafts, unless a fork holds them too."""
        kept, most = self.blocks_of(length), self.most_blocks(length)
        self.lengths[seq] = length
        table = self.tables[seq]
        ahead = [block for block in table[kept:] if self.holders[block] == 1][: most - kept]
        self.drop(block for block in table[kept:] if block not in ahead)
        self.tables[seq] = [*table[:kept], *ahead]


class SparingCache(LookaheadCache):
    """Holds more blocks for a sequence as long as some are free. It is right."""

    def look_ahead(self, seq: int) -> None:
        while self.unused and len(self.tables[seq]) < self.most_blocks(self.lengths[seq]):
            self.tables[seq].append(self.take())

    def take(self) -> int:
        if not self.unused:  # takes back what others hold for tokens to come
            for seq, table in self.tables.items():
                kept = self.blocks_of(self.lengths[seq])
                if kept < len(table):
                    self.drop(table[kept:])
                    self.tables[seq] = table[:kept]
        return super().take()


class LookaheadTextCache(TextCache):
    """Finds blocks by their texts, and holds one more for each sequence. It is right."""

    lookahead_blocks = 1
    head_counts = (1, 2)
    head_dims = (4,)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if sum(self.blocks_to_take(seq, 1) for seq in seqs) > len(self.unused):
            raise CacheFull
        for row, (seq, token_ids) in enumerate(zip(seqs, self.row_tokens, strict=True)):
            self.write(seq, token_ids, key[:, row : row + 1], value[:, row : row + 1])

    def hold_found(self, token_ids: Sequence[int]) -> list[int]:
        found = self.found(token_ids)
        needed = self.most_blocks(len(token_ids)) - sum(map(bool, map(self.is_held, found)))
        if needed > len(self.unused):
            raise CacheFull
        for block in found:
            self.hold(block)
        return found

    def is_held(self, block: int) -> bool:
        return self.holders[block] > 0

    def most_blocks(self, length: int) -> int:
        return -(-length // self.spec.block_size) + self.lookahead_blocks

    def blocks_to_take(self, seq: int, count: int) -> int:
        length = len(self.token_ids.get(seq, ())) + count
        return self.most_blocks(length) - len(self.tables.get(seq, ()))

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        size = self.spec.block_size
        table, stored = self.tables.setdefault(seq, []), self.token_ids.setdefault(seq, [])
        for row, token in enumerate(token_ids):
            at, position = divmod(len(stored), size)
            if at == len(table):
                table.append(self.open())
            self.keys[:, table[at], :, position] = key[:, row]
            self.values[:, table[at], :, position] = value[:, row]
            stored.append(token)
            if position == size - 1:
                self.register_at(seq, at)
        while len(table) < self.most_blocks(len(stored)):
            table.append(self.open())

    def register_at(self, seq: int, at: int) -> None:
        """Register a full block of a sequence, which may have later ones."""
        table, up_to = self.tables[seq], self.tables[seq][: at + 1]
        self.register(up_to, self.token_ids[seq][: (at + 1) * self.spec.block_size])
        table[at] = up_to[-1]


class LeaksLookaheadBlocks(LookaheadCache):
    """Frees only the blocks of a sequence that hold tokens."""

    def free(self, seq: int) -> None:
        del self.tables[seq][self.blocks_of(self.lengths[seq]) :]
        super().free(seq)


class SharesLookaheadBlocks(LookaheadCache):
    """Begins a fork with its parent's look-ahead blocks too, to which both then write."""

    fork = CutCache.fork


class LooksAheadTooFar(LookaheadCache):
    """Holds one block more than it declares for a sequence that ends with a block."""

    def most_blocks(self, length: int) -> int:
        return length // self.spec.block_size + 1 + self.lookahead_blocks


class KeepsTheBlocksOfAllDrafts(LookaheadCache):
    """Keeps every block of the tokens that are cut off, for the next drafts."""

    def truncate(self, seq: int, length: int) -> None:
        self.lengths[seq] = length


class RegistersLookaheadBlocks(LookaheadTextCache):
    """Registers every block of a table for later texts, also those that hold no token."""

    def write(
        self, seq: int, token_ids: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        super().write(seq, token_ids, key, value)
        for at in range(len(self.token_ids[seq]) // self.spec.block_size, len(self.tables[seq])):
            self.register_at(seq, at)

    def register(self, table: list[int], token_ids: Sequence[int]) -> None:
        if len(token_ids) == len(table) * self.spec.block_size:
            super().register(table, token_ids)
        else:
            self.block_of[self.key(token_ids)] = table[-1]
            self.key_of[table[-1]] = self.key(token_ids)


RIGHT = (LookaheadCache, SparingCache, LookaheadTextCache)
BROKEN = (
    LeaksLookaheadBlocks,
    SharesLookaheadBlocks,
    LooksAheadTooFar,
    KeepsTheBlocksOfAllDrafts,
    RegistersLookaheadBlocks,
)
