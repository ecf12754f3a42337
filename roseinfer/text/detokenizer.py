"""Incremental detokenization that uses only the ``decode`` of a tokenizer.

Tokens cannot be decoded one by one: a character may be split over several of them, and a space
before a word may depend on previous tokens. So a window of the latest tokens is decoded together,
at a cost that does not grow with the text, and the text that was returned already is cut off its
beginning. ``require_incremental_decode`` checks that a tokenizer may be treated this way.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNSTABLE_CHARACTERS = 3
"""Most replacement characters that later bytes may still turn into one character."""
_MIN_PENDING_TOKENS = _MAX_UNSTABLE_CHARACTERS * _MAX_UNSTABLE_CHARACTERS + _MAX_UNSTABLE_CHARACTERS
"""Number of tokens that determine the last replacement characters, whatever precedes them: each of
these is at most three bytes, and after three bytes decoders agree on where a character begins."""


class TokenDecoder(Protocol):
    """The part of a transformers tokenizer that detokenization uses."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class IncrementalDetokenizer(Protocol):
    """A detokenizer of one growing sequence of tokens. Special tokens add no text."""

    def add(self, token: int, /) -> str:
        """Add a token, and return the text that became final with it."""

    def flush(self) -> str:
        """Return the rest after the last token."""


class TextMayChange(Exception):
    """A reason why a later token may change text that other detokenizers have returned."""


class WholeTextDetokenizer:
    """A detokenizer for any tokenizer, which decodes a text once, at its end."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []

    def add(self, token: int) -> str:
        """Add a token; return no text, since a later token may change all of it."""
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        """Return the whole text, once."""
        tokens, self._tokens = self._tokens, []
        return _decode_tokens(self._tokenizer, tokens) if tokens else ""


class WindowDetokenizer:
    """A detokenizer that decodes a window of the latest tokens. Special tokens add no text.

    The returned texts, joined, equal ``decode(tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`` for tokenizers whose later tokens change at most an
    incomplete character at the end.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._earlier: list[int] = []
        self._latest: list[int] = []
        """With ``_earlier``, the tokens of the two latest texts that ended in a whole character.
        One text is not enough: if it is blank, the next would be at the beginning, where some
        decoders drop a space."""
        self._pending: list[int] = []
        """Tokens since then. Their last character may be incomplete."""
        self._text = ""
        """Text of all these tokens."""
        self._returned = ""
        """Part of that text that was returned already."""

    def add(self, token: int) -> str:
        """Add a token, and return the text that became final with it."""
        window = [*self._earlier, *self._latest, *self._pending]
        text = self._decode([*window, token])
        if text == self._text and self._is_skipped(window, token):
            return ""
        self._pending.append(token)
        self._text = text
        return self._take_stable_text()

    def flush(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        if not self._pending:
            return ""
        remainder = self._text[len(self._returned) :]
        self._settle()
        return remainder

    def _is_skipped(self, window: list[int], token: int) -> bool:
        """Return True for a special token, or one beyond the vocabulary: neither affects the text.

        A token of blanks does not count: it may add text once more follows.
        """
        if self._decode([token, token]):
            return False
        return self._decode([*window, token, *window]) == self._decode([*window, *window])

    def _take_stable_text(self) -> str:
        returned = len(self._returned)
        # The number of last characters that the next token may change.
        unstable = min(
            _MAX_UNSTABLE_CHARACTERS, len(self._text) - len(self._text.rstrip(_REPLACEMENT))
        )
        self._returned = self._text[: max(returned, len(self._text) - unstable)]
        new = self._returned[returned:]
        if not unstable and new:
            self._settle()
        elif unstable and len(self._pending) > _MIN_PENDING_TOKENS:
            self._shorten(unstable)
        return new

    def _settle(self) -> None:
        """Shift the window, when all text was returned and the next token begins a character."""
        self._earlier, self._latest, self._pending = self._latest, self._pending, []
        self._text = self._returned = self._decode(self._earlier + self._latest)

    def _shorten(self, unsure: int) -> None:
        """Drop the first pending tokens, whose text was returned."""
        self._pending = self._pending[-_MIN_PENDING_TOKENS:]
        self._text = self._decode(self._earlier + self._latest + self._pending)
        self._returned = self._text[: len(self._text) - unsure]

    def _decode(self, token_ids: list[int]) -> str:
        return _decode_tokens(self._tokenizer, token_ids)


def _decode_tokens(tokenizer: TokenDecoder, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# Byte-level vocabularies, like those of GPT-2, Llama 3 and Qwen.
#
# Every token stands for bytes, so its text is a lookup, and depends on other tokens only if a
# character is split over several.


_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""Byte of each character of a byte-level vocabulary: printable characters of Latin-1 stand for the
byte of the same number."""
_MAX_CACHED_PIECES = 1 << 18
"""Number of tokens in the largest vocabularies."""


class TokenPiece(NamedTuple):
    """The bytes and text of a token, after a text that ends in a whole character."""

    data: bytes
    text: str
    """Characters that no later token can change."""
    remainder: bytes
    """Bytes at the end that are the beginning of an incomplete character."""


class PiecesByTokenId(dict[int, TokenPiece]):
    """The piece of each token id, computed at first use."""

    def __init__(self, written: Mapping[int, str | None]) -> None:
        super().__init__()
        self._token_strings = written

    def __missing__(self, token: int) -> TokenPiece:
        piece = self[token] = _piece(self._token_strings[token] or "")
        return piece


class PiecesByTokenString(dict[str, TokenPiece]):
    """The piece of each token string, computed at first use and cached within a limit."""

    def __missing__(self, written: str) -> TokenPiece:
        piece = _piece(written)
        if len(self) < _MAX_CACHED_PIECES:
            self[written] = piece
        return piece


class ByteLevelJoiner:
    """A joiner of byte-level tokens by the bytes that they stand for."""

    def __init__(self, pieces: PiecesByTokenId | PiecesByTokenString) -> None:
        self._pieces: Mapping[Any, TokenPiece] = pieces
        self._remainder = b""

    def add(self, token: Any) -> str:
        """Add a token, and return the text that became final with it."""
        data, text, remainder = self._pieces[token]
        if self._remainder:
            text, remainder = _decode(self._remainder + data)
        self._remainder = remainder
        return text

    def flush(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        remainder, self._remainder = self._remainder, b""
        return remainder.decode(errors="replace")


def _piece(written: str) -> TokenPiece:
    if all(character in BYTE_OF for character in written):
        data = bytes(BYTE_OF[character] for character in written)
    else:  # an added token is written as it is
        data = written.encode()
    return TokenPiece(data, *_decode(data))


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes at the end that may be an incomplete character."""
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]
