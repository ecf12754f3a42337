"""Small tokenizers that decode as those of well-known models do, built on the spot."""

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
"""Beyond every vocabulary here, as the padding of a model's own can be."""
SAMPLE = "aé€😀好"
"""Characters of one to four bytes."""


def metaspace(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.Metaspace())


def word_ends(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.BPEDecoder(suffix="</w>"))


def word_pieces(pieces: Sequence[str]) -> PreTrainedTokenizerBase:
    return _tokenizer(["<s>", *pieces], decoders.WordPiece(cleanup=True), clean_up=True)


def byte_level(pieces: Sequence[bytes]) -> PreTrainedTokenizerBase:
    """Tokens of several bytes each, wherever characters begin."""
    return _tokenizer(["<s>", *map(_written, pieces)], decoders.ByteLevel())


def words(known: Sequence[str]) -> PreTrainedTokenizerBase:
    """It knows these words, with spaces between, and raises an ``Exception`` for any other."""
    return _of_words(known, pre_tokenizers.WhitespaceSplit())


def panics_at_encoding(known: Sequence[str], run: str = "x") -> PreTrainedTokenizerBase:
    """Its regular expression gives up on a long run of one letter, and Rust panics."""
    hopeless = pre_tokenizers.Split(Regex(f"({run}+{run}+)+!| "), "removed")
    return _of_words(known, hopeless)


def panics_at_decoding(known: Sequence[str]) -> PreTrainedTokenizerBase:
    """Its decoder strips more spaces than a token of a single one has, and Rust panics."""
    tokenizer = words(known)
    tokenizer.backend_tokenizer.decoder = decoders.Strip(" ", 0, 2)
    return tokenizer


def _of_words(known: Sequence[str], cut: Any) -> PreTrainedTokenizerBase:
    numbered = {word: at for at, word in enumerate(known)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered))
    backend.pre_tokenizer = cut
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def all_cuts(longest: int = 3) -> list[bytes]:
    """Return every string of up to three bytes of those that ``SAMPLE`` has."""
    alphabet = sorted(set(SAMPLE.encode()))
    lengths = range(1, longest + 1)
    return [bytes(each) for n in lengths for each in product(alphabet, repeat=n)]


def _written(piece: bytes) -> str:
    """GPT-2's vocabulary writes a byte as itself where it is printable, else from 256 up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte if byte in plain else 256 + others.index(byte)) for byte in piece)


def _tokenizer(
    vocabulary: Sequence[str], decoder: Any, *, clean_up: bool = False
) -> PreTrainedTokenizerBase:
    numbered = {token: at for at, token in enumerate(vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbered, unk_token="<s>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=clean_up
    )
