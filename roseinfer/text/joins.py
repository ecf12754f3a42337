"""Joins tokens to one text, token by token. ``byte_level.py`` has the one for bytes."""

from __future__ import annotations

from typing import Protocol


class Join(Protocol):
    """Makes one text of the tokens of one request."""

    def add(self, token: str, /) -> str:
        """Take one more token, and return the text that became certain with it."""

    def flush(self) -> str:
        """Return the rest, now that no token follows."""


class PlainJoin:
    """Puts nothing between tokens."""

    def add(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


class SpacedJoin:
    """Puts a space between tokens, as a tokenizer without a decoder does."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, token: str) -> str:
        space, self._space = self._space, " "
        return space + token

    def flush(self) -> str:
        return ""


class WordEndJoin:
    """Writes a space for the mark that ends a word (``BPEDecoder``), but none after the last."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._if_more, self._if_last = "", ""
        """What the newest token adds if another follows, and if none does."""

    def add(self, token: str) -> str:
        marked = token.find(self._mark)
        certain, rest = (token, "") if marked < 0 else (token[:marked], token[marked:])
        text = self._if_more + certain
        self._if_more, self._if_last = rest.replace(self._mark, " "), rest.replace(self._mark, "")
        return text

    def flush(self) -> str:
        text, self._if_more, self._if_last = self._if_last, "", ""
        return text
