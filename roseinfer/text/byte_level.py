"""Decodes byte-level vocabularies, like those of GPT-2, Llama 3 and Qwen.

Every token stands for bytes, so what it adds to the text is a look-up, and depends on other tokens
only where a character is spread over several.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Any, NamedTuple

from tokenizers.decoders import ByteLevel

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""The byte that each character of such a vocabulary stands for: the one of the same number if it
can be printed, as in Latin-1."""


class Piece(NamedTuple):
    """What a token adds to a text that ends in a whole character."""

    data: bytes
    text: str
    """The characters that no later token can change."""
    rest: bytes
    """Bytes at the end that begin a character and do not complete it."""


class TokenPieces(dict[int, Piece]):
    """Maps each token to its piece, which is made when it is first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token for token, what in added.items() if what.special}

    @staticmethod
    def serve(tokenizer: Any) -> bool:
        """Return whether a tokenizer decodes by bytes alone."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return isinstance(getattr(backend, "decoder", None), ByteLevel)

    def __missing__(self, token: int) -> Piece:
        written = None if token in self._special else self._backend.id_to_token(token)
        if written is None:  # a special token, or one beyond the vocabulary
            data = b""
        elif all(character in BYTE_OF for character in written):
            data = bytes(BYTE_OF[character] for character in written)
        else:  # an added token is written as it is
            data = written.encode()
        piece = self[token] = Piece(data, *_decode(data))
        return piece


class ByteLevelDetokenizer:
    """Decodes one growing sequence of tokens. Special tokens add no text."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._rest = b""

    def add(self, token: int) -> str:
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


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the bytes at the end that may begin a character."""
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]
