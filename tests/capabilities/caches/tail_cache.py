"""A cache that finds parts of blocks and leaves what was found as it is; and ones gone wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.branching_text_caches import BranchingTextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec


class TailCache(BranchingTextCache):
    """A partial block is known once its sequence is gone; who begins with it writes into a copy."""

    prefixes = BranchingTextCache.prefixes.but(
        granularity="token", finds="some", keeps_prefix=True, evicts="any"
    )
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (4, 1, 2, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.found_blocks: Counter[int] = Counter()
        """How many of a sequence's first blocks were found, and are still those."""

    def others(self, seq: int, at: int) -> int:
        """Count the cache itself as one that has what was found."""
        return super().others(seq, at) + (at < self.found_blocks[seq])

    def find_all(self, said: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks that are found of a text, the last of which may be partial."""
        full = self.found(said)
        end = len(full) * self.spec.block_size
        for stop in range(min(len(said), end + self.spec.block_size - 1), end, -1):
            tail = self.find(said[:stop])
            if tail is not None:
                return [*full, tail], stop
        return full, end

    def match_prefix(self, said: Sequence[int]) -> int:
        return self.find_all(said)[1]

    def begin_with(self, found: Any, seq: int) -> int:
        self.tables[seq], tokens = self.find_all(found)
        for block in self.tables[seq]:
            self.hold(block)
        self.said[seq] = list(found[:tokens])
        self.found_blocks[seq] = len(self.tables[seq])
        return tokens

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.found_blocks[child] = self.found_blocks[parent]

    def own_last(self, seq: int) -> None:
        super().own_last(seq)
        self.leave(seq, len(self.tables[seq]) - 1)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.leave(seq, len(self.tables[seq]))

    def leave(self, seq: int, blocks: int) -> None:
        """Note that a sequence has at most its first blocks of what was found."""
        self.found_blocks[seq] = min(blocks, self.found_blocks[seq])

    def free(self, seq: int) -> None:
        table, said = self.tables[seq], self.said[seq]
        if len(said) % self.spec.block_size and not self.others(seq, len(table) - 1):
            key = self.key(said)
            if self.block_of.setdefault(key, table[-1]) == table[-1]:
                self.key_of[table[-1]] = key
        super().free(seq)
        del self.found_blocks[seq]


class CountsNoCopy(TailCache):
    """It looks for room as if who begins with a partial block were alone in it."""

    def append(self, seqs, key, value):  # type: ignore[no-untyped-def]
        size = self.spec.block_size
        if sum(len(self.said.get(seq, ())) % size == 0 for seq in seqs) <= len(self.unused):
            for row, (seq, said) in enumerate(zip(seqs, self.row_tokens, strict=True)):
                self.write(seq, said, key[:, row : row + 1], value[:, row : row + 1])
            return
        super().append(seqs, key, value)


class SaysNothingOfIt(TailCache):
    """It is right, but does not say that what is found stays as it is."""

    prefixes = TailCache.prefixes.but(keeps_prefix=False)
