"""Decodes tokens as they come by a tokenizer of which nothing is known but its ``decode``.

Tokens cannot be decoded one by one: a character may be spread over several of them, and whether a
space stands before a word depends on what came earlier. So a window of the latest tokens is decoded
together, at a cost that does not grow with the text, and what was returned before is cut off the
front. ``agreement.py`` tries whether a tokenizer may be treated so.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNSURE = 3
"""The most replacement characters that later bytes may still turn into one character."""
_LATEST = _UNSURE * _UNSURE + _UNSURE
"""So many tokens settle the last replacement characters, whatever stands before them: each of
these is up to three bytes, and after three bytes decoders agree on where a character begins."""


class Decodes(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class DecodesInPieces(Protocol):
    """Decodes one growing sequence of tokens. Special tokens add no text."""

    def add(self, token: int, /) -> str:
        """Take one more token, and return the text that became certain with it."""

    def flush(self) -> str:
        """Return the rest after the last token."""


class Detokenizer:
    """Decodes one growing sequence of tokens. Special tokens add no text.

    The texts that are returned, joined, equal ``decode(tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`` where more tokens change nothing but an incomplete
    character at the end.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._earlier: list[int] = []
        self._latest: list[int] = []
        """With ``_earlier``, the tokens of the two latest texts that ended in a whole character.
        One is not enough: a blank one would let the next stand at the beginning, where some
        decoders drop a space."""
        self._pending: list[int] = []
        """The tokens since then. Their last character may not be complete."""
        self._text = ""
        """The text of all these tokens."""
        self._returned = ""
        """The part of that text which was returned."""

    def add(self, token: int) -> str:
        """Take one more token, and return the text that became certain with it."""
        window = [*self._earlier, *self._latest, *self._pending]
        text = self._decode([*window, token])
        if text == self._text and self._adds_nothing(window, token):
            return ""
        self._pending.append(token)
        self._text = text
        return self._return_what_is_certain()

    def flush(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        if not self._pending:
            return ""
        rest = self._text[len(self._returned) :]
        self._settle()
        return rest

    def _adds_nothing(self, window: list[int], token: int) -> bool:
        """Return True for a special token, or one beyond the vocabulary: it separates nothing.

        A blank one is another matter: it may show once text follows.
        """
        if self._decode([token, token]):
            return False
        return self._decode([*window, token, *window]) == self._decode([*window, *window])

    def _return_what_is_certain(self) -> str:
        returned = len(self._returned)
        # The next token may change so many characters.
        unsure = min(_UNSURE, len(self._text) - len(self._text.rstrip(_REPLACEMENT)))
        self._returned = self._text[: max(returned, len(self._text) - unsure)]
        new = self._returned[returned:]
        if not unsure and new:
            self._settle()
        elif unsure and len(self._pending) > _LATEST:
            self._shorten(unsure)
        return new

    def _settle(self) -> None:
        """Shift the window: all text was returned, and the next token starts a character."""
        self._earlier, self._latest, self._pending = self._latest, self._pending, []
        self._text = self._returned = self._decode(self._earlier + self._latest)

    def _shorten(self, unsure: int) -> None:
        """Drop the first pending tokens, the text of which was returned."""
        self._pending = self._pending[-_LATEST:]
        self._text = self._decode(self._earlier + self._latest + self._pending)
        self._returned = self._text[: len(self._text) - unsure]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


# Decodes byte-level vocabularies, like those of GPT-2, Llama 3 and Qwen.
#
# Every token stands for bytes, so what it adds to the text is a look-up, and depends on other
# tokens only where a character is spread over several.


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
