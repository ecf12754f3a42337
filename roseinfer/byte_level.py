"""Text from the tokens of byte-level vocabularies, which stand for bytes and nothing else.

Those of GPT-2, Llama 3, Qwen and most newer models are. What a token adds then depends on no
other token but for a character that is spread over several, and costs a look-up.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import ByteLevel

if TYPE_CHECKING:
    from collections.abc import Iterable

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that such a vocabulary writes as the character of that number."""
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}
"""What a vocabulary writes for each byte."""
_Decoder = getincrementaldecoder("utf-8")


class TokenBytes:
    """The bytes of every token, looked up when first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token for token, what in added.items() if what.special}
        self._known: dict[int, bytes] = {}

    @staticmethod
    def serve(tokenizer: Any) -> bool:
        """Whether a tokenizer decodes by bytes alone."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return isinstance(getattr(backend, "decoder", None), ByteLevel)

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes:
        written = None if token in self._special else self._backend.id_to_token(token)
        if written is None:  # a special token, or one beyond the vocabulary
            return b""
        if all(character in BYTE_OF for character in written):
            return bytes(BYTE_OF[character] for character in written)
        return bytes(written, "utf-8")  # a token that was added is written as it is


class ByteLevelDetokenizer:
    """The text of one growing sequence of tokens. Special tokens have none."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = _Decoder("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""
        decode, of = self._decoder.decode, self._bytes
        return "".join([decode(of[token]) for token in token_ids])

    def flush(self) -> str:
        """The rest, once all tokens were added: what is incomplete, as replacement characters."""
        return self._decoder.decode(b"", True)
