"""What sequences say, where a cache is told: which texts begin alike, and for how long.

A text never ends; a sequence holds the beginning of one. Texts branch off each other like a tree,
so whether two beginnings are equal is known without comparing them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Branch = tuple[int, int]
"""A text begins as another one, for so many tokens. The first is a branch of itself."""
WHOLE = 1 << 16
"""More tokens than any sequence has: a text that begins as another for so long is equal to it."""


@dataclass(slots=True)
class Texts:
    """The texts of one history, and the branches that forks add to them."""

    drawn: tuple[Branch, ...]
    _branches: list[Branch] = field(init=False)
    _forked: dict[int, int] = field(default_factory=dict, init=False)
    """The texts of sequences that began as forks."""

    def __post_init__(self) -> None:
        self._branches = list(self.drawn)

    def of(self, seq: int, life: int) -> int:
        """Return the text of a sequence; ``life`` others had its name before it."""
        return self._forked.get(seq, (seq + life) % len(self.drawn))

    def fork(self, parent: int, child: int, length: int) -> None:
        """Give ``child``, a sequence, the first tokens of ``parent``, a text, and others after."""
        self._forked[child] = len(self._branches)
        self._branches.append((parent, length))

    def forget(self, seq: int) -> None:
        self._forked.pop(seq, None)

    def owner(self, text: int, position: int) -> int:
        """Return the text that this one still begins as at a position.

        Two texts are equal up to a position if their owners there are.
        """
        parent, length = self._branches[text]
        while parent != text and position < length:
            text = parent
            parent, length = self._branches[text]
        return text

    def tokens(self, text: int, begin: int, end: int) -> list[int]:
        """List what a text says; one position's token may well stand at another, too."""
        return [self.owner(text, at) + 1 for at in range(begin, end)]
