"""Caches that find partial blocks and leave found prefixes as they are: right and broken ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.branching_text_caches import BranchingTextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec


class TailCache(BranchingTextCache):
    """Finds the partial last block of a freed sequence; an append to a found block copies it."""

    prefixes = BranchingTextCache.prefixes.but(
        granularity="token", finds="some", keeps_prefix=True, evicts="any"
    )
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (4, 1, 2, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.found_blocks: Counter[int] = Counter()
        """Number of a sequence's first blocks that were found, and not replaced since."""

    def others(self, seq: int, at: int) -> int:
        """Return the number of other holders, with the cache itself as a holder of found blocks."""
        return super().others(seq, at) + (at < self.found_blocks[seq])

    def find_longest(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks of the longest found prefix, the last of which may be partial."""
        full = self.found(token_ids)
        end = len(full) * self.spec.block_size
        for stop in range(min(len(token_ids), end + self.spec.block_size - 1), end, -1):
            tail = self.find(token_ids[:stop])
            if tail is not None:
                return [*full, tail], stop
        return full, end

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        return self.find_longest(token_ids)[1]

    def begin_with(self, found: Any, seq: int) -> int:
        self.tables[seq], tokens = self.find_longest(found)
        for block in self.tables[seq]:
            self.hold(block)
        self.token_ids[seq] = list(found[:tokens])
        self.found_blocks[seq] = len(self.tables[seq])
        return tokens

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.found_blocks[child] = self.found_blocks[parent]

    def own_last(self, seq: int) -> None:
        super().own_last(seq)
        self.limit_found_blocks(seq, len(self.tables[seq]) - 1)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.limit_found_blocks(seq, len(self.tables[seq]))

    def limit_found_blocks(self, seq: int, blocks: int) -> None:
        """Limit a sequence's number of found blocks to its first ``blocks``."""
        self.found_blocks[seq] = min(blocks, self.found_blocks[seq])

    def free(self, seq: int) -> None:
        table, token_ids = self.tables[seq], self.token_ids[seq]
        if len(token_ids) % self.spec.block_size and not self.others(seq, len(table) - 1):
            key = self.key(token_ids)
            if self.block_of.setdefault(key, table[-1]) == table[-1]:
                self.key_of[table[-1]] = key
        super().free(seq)
        del self.found_blocks[seq]


class CountsNoCopy(TailCache):
    """Counts no room for copying the partial block of a found prefix."""

    def append(self, seqs, key, value):  # type: ignore[no-untyped-def]
        size = self.spec.block_size
        if sum(len(self.token_ids.get(seq, ())) % size == 0 for seq in seqs) <= len(self.unused):
            for row, (seq, token_ids) in enumerate(zip(seqs, self.row_tokens, strict=True)):
                self.write(seq, token_ids, key[:, row : row + 1], value[:, row : row + 1])
            return
        super().append(seqs, key, value)


class DoesNotDeclareKeptPrefixes(TailCache):
    """Is right, and does not declare that found prefixes stay as they are."""

    prefixes = TailCache.prefixes.but(keeps_prefix=False)
