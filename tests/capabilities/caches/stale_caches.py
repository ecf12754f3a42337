"""Caches that keep state of a freed sequence, and use it for the next one of its name."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull

from .list_cache import ListCache
from .paged_cache import PagedCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec


class KeepsTheLength(PagedCache):
    """Frees the table and keeps the length."""

    def free(self, seq: int) -> None:
        self.unused += self.tables.pop(seq)


class KeepsTheTokens(ListCache):
    """Frees only the length of a sequence, and does not overwrite its stored tokens."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.lengths: Counter[int] = Counter()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        new = [i for i, seq in enumerate(seqs) if self.lengths[seq] == len(self.rows.get(seq, ()))]
        super().append([seqs[i] for i in new], key[:, new], value[:, new])
        self.lengths.update(seqs)

    def free(self, seq: int) -> None:
        del self.lengths[seq]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().peek(seq, layer)
        return keys[: self.lengths[seq]], values[: self.lengths[seq]]


class ForksToTheOldLength(PagedCache):
    """Gives a fork the length of the earlier sequence of its name."""

    fork_shares = "nothing"

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.freed_lengths: dict[int, int] = {}

    def free(self, seq: int) -> None:
        self.freed_lengths[seq] = self.lengths[seq]
        super().free(seq)

    def fork(self, parent: int, child: int) -> None:
        table = self.tables[parent]
        if len(table) > len(self.unused):
            raise CacheFull(f"{len(table)} blocks needed, {len(self.unused)} free")
        self.tables[child] = [self.unused.pop(0) for _ in table]
        for cache in (self.keys, self.values):
            cache[:, self.tables[child]] = cache[:, table]
        self.lengths[child] = self.freed_lengths.get(child, self.lengths[parent])
