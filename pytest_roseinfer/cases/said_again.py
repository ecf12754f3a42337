"""Draws how sequences begin that may find what was said before: under which name, and how far."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Texts

_MAY_FIND = 4
"""How often a name is listed under which something is in its namespace, and not in others alone."""
_PARTS = 3
"""How much more often one is whose text goes another way inside of what was said."""


@dataclass(slots=True)
class SaidBefore:
    """What the sequences of a history have said so far, each as far as any of them said it."""

    oracle: Oracle
    least: int
    """The fewest tokens that a cache finds again: a block, or one."""
    _longest: dict[int, int] = field(default_factory=dict)
    """How many tokens of each text were said."""

    @property
    def texts(self) -> Texts:
        assert self.oracle.texts
        return self.oracle.texts

    def note(self) -> None:
        """Take what the sequences say by now."""
        for seq in self.oracle.sequences:
            text, length = self.oracle.text_of(seq), self.oracle.length(seq)
            self._longest[text] = max(length, self._longest.get(text, 0))

    def names(self, new: int, vacant: Sequence[int]) -> list[int]:
        """List names under which a new sequence would begin as another did.

        Those from ``new`` on have a text each. Most often listed is one that may find something,
        and goes another way inside of what was said.
        """
        names = self._unused(new, vacant)
        return [name for name in names for _ in range(self._often(name))]

    def repeating(self, new: int, vacant: Sequence[int], tokens: int) -> list[int]:
        """List names under which a new sequence would say again what was said for so long."""
        return [name for name in self._unused(new, vacant) if self.again(name) >= tokens]

    def parting(self, new: int, vacant: Sequence[int], tokens: int) -> list[int]:
        """List names under which a new sequence would say something else before so many tokens."""
        return [name for name in self._unused(new, vacant) if self.again(name) < tokens]

    def _unused(self, new: int, vacant: Sequence[int]) -> list[int]:
        return [*range(new, new + len(self.texts.drawn)), *vacant]

    def _often(self, seq: int) -> int:
        common = self._common(seq)
        again = max(common.values(), default=0)
        if again < self.least:
            return 0
        space, own = self.texts.namespace, self.oracle.text_of(seq)
        within = any(common[text] >= self.least for text in common if space(text) == space(own))
        return (_MAY_FIND if within else 1) * (_PARTS if self._parts(seq) else 1)

    def _parts(self, seq: int) -> bool:
        """Return True for a text that goes another way inside of what was said, however near."""
        common = self._common(seq)
        again = max(common.values(), default=0)
        return all(again < self._longest[text] for text in common if common[text] == again)

    def again(self, seq: int) -> int:
        """Count the first tokens of a new sequence that were said before, in any namespace."""
        return max(self._common(seq).values(), default=0)

    def _common(self, seq: int) -> dict[int, int]:
        """Count the first tokens that a new sequence has in common with each text that was said."""
        own, owner = self.oracle.text_of(seq), self.texts.owner

        def common(text: int, said: int) -> int:
            return bisect_left(range(said), 1, key=lambda at: owner(own, at) != owner(text, at))

        return {text: common(text, said) for text, said in self._longest.items()}

    def lengths(self, seq: int) -> list[int]:
        """List lengths of a new sequence around the end of what was said, and of blocks there.

        One that goes another way there is longer than that.
        """
        size, again = self.oracle.block_size, self.again(seq)
        if again < self.least:
            return []
        last = again - again % size
        ends = {size, last, again, last + size}
        least = again + 1 if self._parts(seq) else 1
        near = {end + more for end in ends if end for more in (-1, 0, 1)}
        return sorted(length for length in near if length >= least)
