"""Small tokenizers for the models that roseinfer's own engine is checked with."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders

from pytest_roseinfer.targets.own.model_shapes import END, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

_END = "<end>"
_BYTES = ("a", "b", "Ġ", "ab", "Ã", "©", "é", "â", "Ĥ", "¬", "âĤ", "ba", "Ġa", "ðŁ", "ĺ", "Ģ", "c")
"""As GPT-2 writes bytes: letters, a space, and characters of which tokens have a part each."""
_WORDS = ("▁a", "▁b", "a", "b", "▁", "ab", "▁ab", "é", "▁ba", "c")


@lru_cache
def tokenizer(*, byte_level: bool) -> Any:
    """Build one in which every token has a text of its own, or one in which words have spaces."""
    if byte_level:
        return _built(_BYTES, decoders.ByteLevel())
    return _built(_WORDS, decoders.Metaspace())


def text_of(tokens: Sequence[int], by: Any) -> str:
    """Return the text of a whole request's tokens, by one of these tokenizers alone."""
    text: str = by.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _built(pieces: Sequence[str], decoder: Any) -> Any:
    from transformers import PreTrainedTokenizerFast  # it takes seconds

    others = (token for token in range(VOCABULARY) if token != END)
    written = {token: f"{pieces[at % len(pieces)]}" for at, token in enumerate(others)}
    for at, token in enumerate(sorted(written)[len(pieces) :]):
        written[token] = chr(ord("A") + at)
    vocabulary = {text: token for token, text in written.items()} | {_END: END}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_END))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_END, clean_up_tokenization_spaces=False
    )
