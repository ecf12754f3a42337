"""The pages that sequences began with, where a cache keeps what was found as it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FoundPages:
    """Knows which pages of a sequence the cache keeps for other texts: none may write there."""

    kept: bool = False
    """As ``KVCacheAdapter.keeps_found``."""
    _counts: Counter[int] = field(default_factory=Counter)
    """How many first pages of each sequence were found, and are still those."""

    def begin(self, seq: int, pages: int) -> None:
        """Note that a sequence began with so many pages."""
        if self.kept:
            self._counts[seq] = pages

    def has(self, seq: int, at: int) -> bool:
        return at < self._counts[seq]

    def fork(self, parent: int, child: int, shared: int) -> None:
        """Note that a child has the first pages of its parent."""
        self._counts[child] = min(shared, self._counts[parent])

    def cut(self, seq: int, pages: int) -> None:
        """Note that a sequence has left all but its first pages."""
        self._counts[seq] = min(pages, self._counts[seq])

    def forget(self, seq: int) -> None:
        del self._counts[seq]
