"""N-gram drafts for speculative decoding, looked up in the sequence itself.

When the last tokens of a sequence occurred earlier in it, prompt included, the tokens that followed
them then are proposed now. Drafts never change the output: the request gets the model's own choice
at each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DRAFT_TOKENS = 8
"""Maximum draft length in tokens. A step that stores this many takes hardly longer than one that
stores a single token."""
_MAX_NGRAM_TOKENS = 3
"""Longest n-gram to look up, in tokens; shorter ones are tried after it."""
_NUM_PROBE_TOKENS = 2
"""Number of last tokens that a draft would have had to predict for drafting to begin again."""
_MIN_BACKOFF_TOKENS = 4
_MAX_BACKOFF_TOKENS = 256
_MAX_CREDIT = 2
_NUM_CODE_POINTS = 0x110000
"""Number of characters in Python. Tokens of a larger vocabulary share some of them, which makes
drafts worse and never wrong."""


@dataclass(slots=True)
class Drafter:
    """Draft source of one request, with backoff while drafts are rejected.

    Rejected drafts start a backoff. Each backoff is twice as long as the previous one, and half as
    long after drafts that were all accepted: a sequence without repetition pays for a few drafts
    only.
    """

    check_interval: int
    """Tokens between two checks of a request that is not drafting."""
    drafting: bool
    """True while each step is preceded by a lookup. The request has no slot then."""
    _text: str = ""
    """One character for each token: strings are searched faster than lists."""
    _next_check_length: int = 0
    """Length in tokens that starts the next check of the request."""
    _backoff_tokens: int = _MIN_BACKOFF_TOKENS
    _credit: int = 0
    """Number of rejections left before a backoff."""

    def should_draft(self, token_ids: Sequence[int]) -> bool:
        """Return True if drafting is on, or is switched on because the sequence repeats itself."""
        if not self.drafting and len(token_ids) >= self._next_check_length:
            probe = len(token_ids) - _NUM_PROBE_TOKENS
            self.drafting = self._look_up(token_ids, probe, _NUM_PROBE_TOKENS) == list(
                token_ids[probe:]
            )
            self._next_check_length = len(token_ids) + self.check_interval
        return self.drafting

    def draft(self, token_ids: Sequence[int], max_drafts: int) -> list[int]:
        """Return at most ``max_drafts`` draft tokens; switch drafting off if none are found."""
        drafts = self._look_up(token_ids, len(token_ids), min(max_drafts, MAX_DRAFT_TOKENS))
        if not drafts:
            self.drafting = False
            self._next_check_length = len(token_ids) + 1
        return drafts

    def record_acceptance(self, accepted: int, drafted: int, length: int) -> None:
        """Record a verification; the request has ``length`` tokens afterwards."""
        self._credit = min(self._credit + accepted - 1, _MAX_CREDIT)
        if self._credit < 0:
            self._credit = 0
            self.drafting = False
            self._next_check_length = length + self._backoff_tokens
            self._backoff_tokens = min(2 * self._backoff_tokens, _MAX_BACKOFF_TOKENS)
        elif accepted == drafted:
            self._backoff_tokens = max(self._backoff_tokens // 2, _MIN_BACKOFF_TOKENS)

    def _look_up(self, token_ids: Sequence[int], num_tokens: int, max_drafts: int) -> list[int]:
        """Return the tokens that followed the newest earlier match of an n-gram.

        The n-gram is the end of the first ``num_tokens`` tokens. If the match ended less than
        ``max_drafts`` tokens ago, the tokens since then are repeated.
        """
        new = token_ids[len(self._text) :]
        self._text += "".join([chr(token % _NUM_CODE_POINTS) for token in new])
        for count in range(min(_MAX_NGRAM_TOKENS, num_tokens - 1), 0, -1):
            at = self._text.rfind(self._text[num_tokens - count : num_tokens], 0, num_tokens - 1)
            if at >= 0:
                begin = at + count
                period = num_tokens - begin
                return [token_ids[begin + at % period] for at in range(max_drafts)]
        return []
