"""Decodes byte-level vocabularies, like those of GPT-2, Llama 3 and Qwen.

Every token stands for bytes, so what it adds to the text is a look-up, and depends on other tokens
only where a character is spread over several.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""The byte that each character of such a vocabulary stands for: the one of the same number if it
can be printed, as in Latin-1."""
_MOST_REMEMBERED = 1 << 18
"""As many tokens as the largest vocabularies have."""


class Piece(NamedTuple):
    """What a token adds to a text that ends in a whole character."""

    data: bytes
    text: str
    """The characters that no later token can change."""
    rest: bytes
    """Bytes at the end that begin a character and do not complete it."""


class TokenPieces(dict[int, Piece]):
    """Maps each token to its piece, which is made when it is first asked for."""

    def __init__(self, written: Mapping[int, str | None]) -> None:
        super().__init__()
        self._written = written

    def __missing__(self, token: int) -> Piece:
        piece = self[token] = _piece(self._written[token] or "")
        return piece


class WrittenPieces(dict[str, Piece]):
    """Maps what tokens are written as to their pieces."""

    def __missing__(self, written: str) -> Piece:
        piece = _piece(written)
        if len(self) < _MOST_REMEMBERED:
            self[written] = piece
        return piece


class ByteLevelJoin:
    """Joins tokens by the bytes that they stand for."""

    def __init__(self, pieces: TokenPieces | WrittenPieces) -> None:
        self._pieces: Mapping[Any, Piece] = pieces
        self._rest = b""

    def add(self, token: Any) -> str:
        """Take one more token, and return the text that became certain with it."""
        data, text, rest = self._pieces[token]
        if self._rest:
            text, rest = _decode(self._rest + data)
        self._rest = rest
        return text

    def flush(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def _piece(written: str) -> Piece:
    if all(character in BYTE_OF for character in written):
        data = bytes(BYTE_OF[character] for character in written)
    else:  # an added token is written as it is
        data = written.encode()
    return Piece(data, *_decode(data))


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes at the end that may begin a character."""
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]
