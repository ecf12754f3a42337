"""The oracle: what a paged cache must hold, in plain Python lists.

It shares no code with any cache. A token is a number that says which sequence wrote it and
at which position; a page is a list of them and a count of holders. Sequences that have the
same name, one after another, write different tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FORK_SHARES = ("blocks", "full blocks", "nothing")
_POSITIONS = 1 << 16
"""The longest sequence whose tokens have numbers of their own."""
_NAMES = 1 << 16
_PADDING_SEQUENCE = 1 << 15


def token_of(seq: int, position: int, life: int = 0) -> int:
    """Number the token at a position of a sequence; ``life`` others had its name before it."""
    return (life * _NAMES + seq) * _POSITIONS + position


def padding_token(row: int) -> int:
    """Number the token that a padding row writes, which belongs in no sequence."""
    return token_of(_PADDING_SEQUENCE, row)


def token_label(token: int) -> str:
    seq, position, life = _parts(token)
    return f"{seq}(life {life + 1}).{position}" if life else f"{seq}.{position}"


def token_words(token: int) -> str:
    seq, position, life = _parts(token)
    if seq == _PADDING_SEQUENCE:
        return f"padding row {position}"
    again = f" (life {life + 1})" if life else ""
    return f"sequence {seq}{again}, token {position}"


def _parts(token: int) -> tuple[int, int, int]:
    """Split a token into sequence, position and life."""
    named, position = divmod(token, _POSITIONS)
    life, seq = divmod(named, _NAMES)
    return seq, position, life


@dataclass(slots=True, eq=False)
class Page:
    """The tokens of one block. Sequences that share it hold the same object."""

    tokens: list[int]
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that are written together."""

    rows: Sequence[tuple[int, int]]
    """Sequences, and how many of the tokens are appended to each."""
    tokens: Sequence[int]
    layout: str = "plain"
    """How they lie in memory when they are handed over."""


@dataclass(slots=True)
class Oracle:
    """Sequences of tokens on pages, with as many pages as the cache has blocks."""

    block_size: int
    capacity: int
    fork_shares: str = "blocks"
    """As ``KVCacheAdapter.fork_shares``."""
    atomic_batches: bool = True
    """As ``KVCacheAdapter.atomic_batches``."""
    sequences: dict[int, list[Page]] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)
    """The number of sequences of each name that were freed."""
    reserved: list[Written] = field(default_factory=list)
    """Tokens that count as stored, since there is room for them, but are not written yet."""

    def tokens(self, seq: int) -> list[int]:
        return [token for page in self.sequences.get(seq, []) for token in page.tokens]

    def length(self, seq: int) -> int:
        return sum(len(page.tokens) for page in self.sequences.get(seq, []))

    def unwritten(self, seq: int) -> int:
        """Count the last tokens of a sequence that are not written yet."""
        return sum(count for due in self.reserved for name, count in due.rows if name == seq)

    def pages_free(self) -> int:
        used = {id(page) for pages in self.sequences.values() for page in pages}
        return self.capacity - len(used)

    def conditions_met(self, rows: Sequence[tuple[int, int]]) -> list[str]:
        """Say for each row what it finds at the end of its sequence, appended in this order."""
        met = []
        leaving: Counter[int] = Counter()
        for seq, _ in rows:
            pages = self.sequences.get(seq)
            last = pages[-1] if pages else None
            if last is None:
                met.append("fresh")
            elif len(last.tokens) == self.block_size:
                met.append("rollover_shared" if last.holders > 1 else "rollover")
            elif last.holders - leaving[id(last)] > 1:
                leaving[id(last)] += 1
                met.append("copy_on_write")
            else:
                met.append("in_place")
        return met

    def pages_needed(self, rows: Sequence[tuple[int, int]]) -> int:
        """Count the new pages that appending ``(sequence, tokens)`` rows in this order takes."""
        needed = self.conditions_met(rows).count("copy_on_write")
        for seq, count in rows:
            pages = self.sequences.get(seq)
            room = self.block_size - len(pages[-1].tokens) if pages else 0
            needed += -(-max(0, count - room) // self.block_size)
        return needed

    def fits(self, rows: Sequence[tuple[int, int]]) -> bool:
        return self.pages_needed(rows) <= self.pages_free()

    def new_tokens(self, rows: Sequence[tuple[int, int]]) -> list[int]:
        """List the tokens that appending these rows writes, row by row."""
        return [
            token_of(seq, position, self.lives[seq])
            for seq, count in rows
            for position in range(self.length(seq), self.length(seq) + count)
        ]

    def append(self, rows: Sequence[tuple[int, int]], tokens: Sequence[int]) -> None:
        coming = iter(tokens)
        for seq, count in rows:
            pages = self.sequences.setdefault(seq, [])
            for _ in range(count):
                self._append_token(pages, next(coming))

    def _append_token(self, pages: list[Page], token: int) -> None:
        if not pages or len(pages[-1].tokens) == self.block_size:
            pages.append(Page([token]))
            return
        if pages[-1].holders > 1:
            pages[-1].holders -= 1
            pages[-1] = Page(list(pages[-1].tokens))
        pages[-1].tokens.append(token)

    def fork(self, parent: int, child: int) -> None:
        self.sequences[child] = []
        for page in self.sequences[parent]:
            shared = self._shares(page)
            page.holders += shared
            self.sequences[child].append(page if shared else Page(list(page.tokens)))

    def fork_fits(self, parent: int) -> bool:
        copied = sum(not self._shares(page) for page in self.sequences[parent])
        return copied <= self.pages_free()

    def _shares(self, page: Page) -> bool:
        full = len(page.tokens) == self.block_size
        return self.fork_shares == "blocks" or (self.fork_shares == "full blocks" and full)

    def free(self, seq: int) -> None:
        self.lives[seq] += 1
        for page in self.sequences.pop(seq):
            page.holders -= 1
