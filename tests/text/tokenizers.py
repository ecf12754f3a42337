"""Small tokenizers with the decoders of well-known models."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

SPECIAL = 0
UNKNOWN = 1_000_000
"""Token beyond every vocabulary here, as the padding of a model can have."""
SAMPLE = "aé€😀好"
"""Characters of one to four bytes."""


def metaspace(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.Metaspace())


def word_ends(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.BPEDecoder(suffix="</w>"))


def word_pieces(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.WordPiece(cleanup=True), clean_up=True)


def byte_level(pieces: Sequence[bytes]) -> PreTrainedTokenizerBase:
    """Build a tokenizer with tokens of several bytes, wherever characters begin."""
    return _tokenizer(["<s>", *map(_encoded, pieces)], decoders.ByteLevel())


def words(vocabulary: Sequence[str]) -> PreTrainedTokenizerBase:
    """Build a tokenizer of these words that raises ``Exception`` for any other word."""
    return _of_words(vocabulary, pre_tokenizers.WhitespaceSplit())


def panics_at_encoding(vocabulary: Sequence[str], run: str = "x") -> PreTrainedTokenizerBase:
    """Build a tokenizer whose regular expression makes Rust panic on a long run of one letter."""
    panicking_split = pre_tokenizers.Split(Regex(f"({run}+{run}+)+!| "), "removed")
    return _of_words(vocabulary, panicking_split)


def panics_at_decoding(vocabulary: Sequence[str]) -> PreTrainedTokenizerBase:
    """Build a tokenizer whose decoder makes Rust panic on a token of a single space."""
    tokenizer = words(vocabulary)
    tokenizer.backend_tokenizer.decoder = decoders.Strip(" ", 0, 2)
    return tokenizer


def _of_words(vocabulary: Sequence[str], cut: Any) -> PreTrainedTokenizerBase:
    ids = {word: at for at, word in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
    backend.pre_tokenizer = cut
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def all_cuts(max_length: int = 3) -> list[bytes]:
    """Return all strings of up to three bytes that ``SAMPLE`` contains."""
    alphabet = sorted(set(SAMPLE.encode()))
    lengths = range(1, max_length + 1)
    return [bytes(each) for n in lengths for each in product(alphabet, repeat=n)]


def _encoded(piece: bytes) -> str:
    """Encode bytes as in GPT-2's vocabulary: printable ones as they are, others from 256 up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte if byte in plain else 256 + others.index(byte)) for byte in piece)


def _tokenizer(
    vocabulary: Sequence[str], decoder: Any, *, clean_up: bool = False
) -> PreTrainedTokenizerBase:
    ids = {token: at for at, token in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<s>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=clean_up
    )
