"""Text from the tokens of byte-level vocabularies, which stand for bytes and nothing else.

Those of GPT-2, Llama 3, Qwen and most newer models are. What a token adds then depends on no
other token but for a character that is spread over several, and costs a look-up.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Any, NamedTuple

from tokenizers.decoders import ByteLevel

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that such a vocabulary writes as the character of that number."""
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""What a vocabulary writes for each byte."""


class Piece(NamedTuple):
    """A token, where it begins with a character's first byte."""

    data: bytes
    text: str
    """What is certain of it."""
    rest: bytes
    """The beginning of a character at its end."""


class TokenPieces(dict[int, Piece]):
    """Every token's, looked up when first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token for token, what in added.items() if what.special}

    @staticmethod
    def serve(tokenizer: Any) -> bool:
        """Whether a tokenizer decodes by bytes alone."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return isinstance(getattr(backend, "decoder", None), ByteLevel)

    def __missing__(self, token: int) -> Piece:
        data = self._bytes_of(token)
        piece = self[token] = Piece(data, *_decode(data))
        return piece

    def _bytes_of(self, token: int) -> bytes:
        written = None if token in self._special else self._backend.id_to_token(token)
        if written is None:  # a special token, or one beyond the vocabulary
            return b""
        if all(character in BYTE_OF for character in written):
            return bytes(BYTE_OF[character] for character in written)
        return bytes(written, "utf-8")  # a token that was added is written as it is


class ByteLevelDetokenizer:
    """The text of one growing sequence of tokens. Special tokens have none."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._rest = b""

    def add(self, token: int) -> str:
        """The text that became certain with one more token."""
        data, text, rest = self._pieces[token]
        if self._rest:
            text, rest = _decode(self._rest + data)
        self._rest = rest
        return text

    def flush(self) -> str:
        """The rest, once all tokens were added: what is incomplete, as replacement characters."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text, and the bytes at the end that may be a character's beginning."""
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]
