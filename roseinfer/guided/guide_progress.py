"""How far a text has come in its grammar, and which tokens it can go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

_BITS = 32


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A grammar at its beginning, which is alive while a text follows it."""

    matcher: Any
    megabytes: int


class GuideProgress:
    """Follows one text. Only the thread that runs the engine uses it."""

    def __init__(self, grammar: Grammar, end_of_grammar: int, end_tokens: Iterable[int]) -> None:
        """``end_tokens`` end the text; ``end_of_grammar`` is the matcher's own, of no text."""
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._end_of_grammar = end_of_grammar
        self._end_tokens = tuple(end_tokens)
        self.may_end = False
        """True if the text may end where the last row of bits was for."""

    def fill(self, row: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next, in words of 32, and clear all others.

        Tokens that end a text may come where the grammar may end. Elsewhere they may not, but for
        one that is text too where no other can come. If the matcher gives up, no token may come.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            row[:] = 0
            return
        words = min(len(row), len(allowed))
        row[:words] = allowed[:words]
        row[words:] = 0
        self.may_end = _bit(allowed, self._end_of_grammar)
        _set(row, self._end_of_grammar, on=False)
        for token in self._end_tokens:
            _set(row, token, on=self.may_end)
        if not (self.may_end or row.any()):
            for token in self._end_tokens:
                _set(row, token, on=_bit(allowed, token))

    def take(self, token: int) -> bool:
        """Go on by a token of the text, and return True if nothing may come behind it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def gave_up(self) -> bool:
        return bool(self._matcher.is_error())

    @property
    def failure(self) -> str:
        """Why there is no next token: the matcher gave up, or the vocabulary has none."""
        if self.gave_up:
            said = self._matcher.get_error().splitlines() or ["it broke off"]
            return f"the form of this text is too hard to follow: {said[0]}"
        return "the form of this text allows none of the tokens that the model can choose"


def _bit(words: npt.NDArray[np.uint32], token: int) -> bool:
    word = token // _BITS
    return word < len(words) and bool(int(words[word]) >> token % _BITS & 1)


def _set(row: npt.NDArray[np.uint32], token: int, *, on: bool) -> None:
    word, bit = token // _BITS, np.uint32(1 << token % _BITS)
    if word < len(row):
        row[word] = row[word] | bit if on else row[word] & ~bit
