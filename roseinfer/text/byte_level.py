"""Decodes byte-level vocabularies, like those of GPT-2, Llama 3 and Qwen.

Every token stands for bytes, so what it adds to the text is a look-up, and depends on other tokens
only where a character is spread over several.
"""

from __future__ import annotations

from codecs import utf_8_decode
from functools import lru_cache
from typing import NamedTuple

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""The byte that each character of such a vocabulary stands for: the one of the same number if it
can be printed, as in Latin-1."""
_REMEMBERED = 1 << 18
"""As many tokens as the largest vocabularies have."""


class Piece(NamedTuple):
    """What a token adds to a text that ends in a whole character."""

    data: bytes
    text: str
    """The characters that no later token can change."""
    rest: bytes
    """Bytes at the end that begin a character and do not complete it."""


class ByteLevelJoin:
    """Joins tokens by the bytes that they stand for."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, token: str) -> str:
        """Take one more token, and return the text that became certain with it."""
        data, text, rest = _piece(token)
        if self._rest:
            text, rest = _decode(self._rest + data)
        self._rest = rest
        return text

    def finish(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


@lru_cache(_REMEMBERED)
def _piece(token: str) -> Piece:
    if all(character in BYTE_OF for character in token):
        data = bytes(BYTE_OF[character] for character in token)
    else:  # an added token is written as it is
        data = token.encode()
    return Piece(data, *_decode(data))


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes at the end that may begin a character."""
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]
