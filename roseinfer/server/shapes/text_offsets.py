"""Where the tokens of a text begin in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.server.shapes.token_texts import TokenTexts


class TextOffsets:
    """The offsets of one choice's tokens, in characters of its text with its prompt before it.

    The text of a token stands at its offset. A token that is a part of a character, or adds
    nothing, begins behind the characters that the tokens before it completed.
    """

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        """``begin`` is how many characters are echoed before the text."""
        self._text = _Growing(token_texts, begin)

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return where tokens begin. They must come in their order."""
        return [self._text.add(token) for token in tokens]


class PromptOffsets:
    """The same for the tokens of a prompt that is echoed."""

    def __init__(self, token_texts: TokenTexts, prompt: str) -> None:
        self._token_texts = token_texts
        self._prompt = prompt
        self._text = _Growing(token_texts, 0)

    def of(self, tokens: Sequence[int]) -> list[int]:
        return [self._add(token) for token in tokens]

    def _add(self, token: int) -> int:
        special = self._token_texts.special(token)
        # One that a tokenizer adds by itself, as at the beginning, is not in the text.
        shown = special if self._prompt.startswith(special, self._text.end) else ""
        # A tokenizer may change what it reads, so that the text of its tokens is longer.
        return min(self._text.add(token, shown), len(self._prompt))


class _Growing:
    """A text of which every token is told where it begins."""

    def __init__(self, token_texts: TokenTexts, begin: int) -> None:
        self._token_texts = token_texts
        self._detokenizer = token_texts.detokenizer()
        self.end = begin

    def add(self, token: int, shown: str = "") -> int:
        """Take one more token, and return where it begins. ``shown`` is added to its text."""
        begin, own = self.end, self._token_texts[token][0]
        added = self._detokenizer.add(token) + shown
        self.end += len(added)
        # Before its own text may stand what is left of a character that others began.
        return self.end - len(own) if added.endswith(own) else begin
