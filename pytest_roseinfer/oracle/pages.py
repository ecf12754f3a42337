"""The pages of the oracle, those that sequences began with, and what is written together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Table = Sequence[int | None]
"""The blocks of a sequence; None for one that was given back."""


@dataclass(slots=True, eq=False)
class Page:
    """The tokens of one block. Sequences that share it hold the same object."""

    tokens: list[int]
    holders: int = 1
    cut: list[int] = field(default_factory=list)
    """Tokens that stood there before a sequence was cut, or on the page that this one copies."""

    def copied(self, seen: Sequence[int]) -> Page:
        """Return a copy for a sequence that sees so much of it."""
        return Page(list(seen), cut=[*self.cut, *self.tokens[len(seen) :]])


def share_as(sequences: Mapping[int, list[Page]], tables: Mapping[int, Table]) -> None:
    """Share pages as a cache shares blocks."""
    pages: dict[int | None, Page] = {}
    for seq, blocks in tables.items():
        own = sequences[seq]
        for at, block in enumerate(blocks):
            own[at] = pages.setdefault(block, Page(own[at].tokens, 0, own[at].cut))
            own[at].holders += 1


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that are written together."""

    rows: Sequence[tuple[int, int]]
    """Sequences, and how many of the tokens are appended to each."""
    tokens: Sequence[int]
    layout: str = "plain"
    """How they lie in memory when they are handed over."""


# The pages that sequences began with, where a cache keeps what was found as it is.


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
