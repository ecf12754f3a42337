"""Drafts of a text's next tokens, looked up in the text itself.

A text that says again what it said before, or what its prompt says, goes on as it did then. Drafts
are only guesses: the model's own choice at their places is what the request gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_DRAFTS = 8
"""So many tokens are drafted at most. A step that stores them takes hardly longer than one that
stores a single token."""
_LONGEST = 3
"""Of a text's last tokens so many are looked up at first, and then fewer."""
_PROOF = 2
"""A text is drafted if its last tokens, so many, would have been drafted rightly."""
_SHORTEST_REST = 4
_LONGEST_REST = 256
_MOST_CREDIT = 2
_CODES = 0x110000
"""Python knows so many characters. Tokens of a larger vocabulary share some, which drafts bear."""


@dataclass(slots=True)
class Drafter:
    """Drafts for one request, as long as they are worth it.

    A rest follows drafts that were refused. Each is twice as long as the one before, and half as
    long after drafts that were all accepted: a text that does not repeat itself pays for a few.
    """

    every: int
    """A request that is not drafted is looked at once in so many tokens."""
    drafting: bool
    """True while drafts are looked for before each step. The request has no slot then."""
    _text: str = ""
    """A character for each token: texts are searched faster than lists."""
    _look_at: int = 0
    """How many tokens the request has when it is looked at again."""
    _rest: int = _SHORTEST_REST
    _credit: int = 0
    """How often drafts may still be refused before a rest."""

    def wakes(self, token_ids: Sequence[int]) -> bool:
        """Return True if drafting is on, or goes on again since the text repeats itself."""
        if not self.drafting and len(token_ids) >= self._look_at:
            known = len(token_ids) - _PROOF
            self.drafting = self._look_up(token_ids, known, _PROOF) == list(token_ids[known:])
            self._look_at = len(token_ids) + self.every
        return self.drafting

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may come next. Drafting ends where there are none."""
        drafts = self._look_up(token_ids, len(token_ids), min(most, MOST_DRAFTS))
        if not drafts:
            self.drafting = False
            self._look_at = len(token_ids) + 1
        return drafts

    def note_verdict(self, accepted: int, drafted: int, length: int) -> None:
        """Note how many drafts were accepted of a request that has ``length`` tokens then."""
        self._credit = min(self._credit + accepted - 1, _MOST_CREDIT)
        if self._credit < 0:
            self._credit = 0
            self.drafting = False
            self._look_at = length + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        elif accepted == drafted:
            self._rest = max(self._rest // 2, _SHORTEST_REST)

    def _look_up(self, token_ids: Sequence[int], known: int, most: int) -> list[int]:
        """Return what may follow the first ``known`` tokens: what did when they ended alike.

        If that was less than ``most`` tokens ago, the text between is taken again and again.
        """
        coming = token_ids[len(self._text) :]
        self._text += "".join([chr(token % _CODES) for token in coming])
        for count in range(min(_LONGEST, known - 1), 0, -1):
            at = self._text.rfind(self._text[known - count : known], 0, known - 1)
            if at >= 0:
                begin = at + count
                period = known - begin
                return [token_ids[begin + each % period] for each in range(most)]
        return []
