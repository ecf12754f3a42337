"""Where the tokens of a text begin in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.server.generation import Piece
    from roseinfer.server.shapes.token_texts import TokenTexts


class TextOffsets:
    """The offsets of one choice, in characters of its text with its prompt before it, if echoed.

    The text of a token stands at its offset. A token that is a part of a character, or adds
    nothing, begins behind the characters that the tokens before it completed.
    """

    def __init__(self, token_texts: TokenTexts, echoed: str) -> None:
        self._token_texts = token_texts
        self._echoed = echoed
        self._text = _Growing(token_texts, len(echoed))

    def of(self, piece: Piece) -> list[int]:
        """Return where the tokens of a piece begin, those of its prompt before those of its text.

        The pieces of a choice must come in their order.
        """
        prompt = _Growing(self._token_texts, 0)
        offsets = []
        for token, _ in piece.echoed:
            special = self._token_texts.special(token)
            # One that a tokenizer adds by itself, as at the beginning, is not in the text.
            shown = special if self._echoed.startswith(special, prompt.end) else ""
            # A tokenizer may change what it reads, so that the text of its tokens is longer.
            offsets.append(min(prompt.add(token, shown), len(self._echoed)))
        return offsets + [self._text.add(token) for token in piece.tokens]


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
