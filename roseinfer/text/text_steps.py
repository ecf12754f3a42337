"""What decoders do to a text after its tokens were joined, as it grows."""

from __future__ import annotations

from typing import Protocol

from tokenizers import decoders


class TextStep(Protocol):
    """Changes the text of one request as it comes."""

    def add(self, text: str, /) -> str:
        """Take more text, and return what became certain with it."""

    def flush(self) -> str:
        """Return the rest, now that the text has ended."""


class Replacement:
    """Replaces a text wherever it stands."""

    def __init__(self, find: str, by: str) -> None:
        self._find = find
        self._by = by
        self._held = ""
        """The end of the text, if it begins what is to be replaced."""

    def add(self, text: str) -> str:
        *before, rest = (self._held + text).split(self._find)
        begun = min(len(rest), len(self._find) - 1)
        while not rest.endswith(self._find[:begun]):
            begun -= 1
        certain = len(rest) - begun
        self._held = rest[certain:]
        return self._by.join([*before, rest[:certain]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Strip:
    """Drops a character up to ``left`` times at the beginning, and ``right`` times at the end."""

    def __init__(self, character: str, left: int, right: int) -> None:
        self._character = character
        self._left = left
        self._right = right
        self._begun = False
        """True when it is known which of the text is dropped at the beginning."""
        self._held = ""

    def add(self, text: str) -> str:
        self._held += text
        if not self._begun:
            rest = self._held.lstrip(self._character)
            if not rest and len(self._held) < self._left + self._right:
                return ""
            self._begun = True
            self._held = self._held[min(self._left, len(self._held) - len(rest)) :]
        strippable = len(self._held) - len(self._held.rstrip(self._character))
        certain = len(self._held) - min(self._right, strippable)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        if self._begun:  # what is held back is what is dropped at the end
            return ""
        # Both ends meet. tokenizers panics at some of these texts.
        text: str = decoders.Strip(self._character, self._left, self._right).decode([held])
        return text
