"""Byte-level detokenization by lookup, compared with the tokenizers' own decoding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from roseinfer.text.completion_text import new_detokenizer_factory
from roseinfer.text.detokenizer import BYTE_OF
from tests.text.tokenizers import SPECIAL, UNKNOWN, all_cuts, byte_level


@lru_cache(maxsize=1)
def cut_bytes() -> Any:
    """Build a tokenizer with pieces that cut through characters, and with added tokens."""
    tokenizer = byte_level([bytes([byte]) for byte in range(256)] + all_cuts(3))
    tokenizer.add_tokens(["héllo wörld", "plain", " spaced "])
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|tool|>")]})
    return tokenizer


tokens = st.integers(0, len(cut_bytes()) - 1) | st.sampled_from([SPECIAL, UNKNOWN])
new_detokenizer = new_detokenizer_factory(cut_bytes())


def decode(token_ids: list[int]) -> str:
    text: str = cut_bytes().decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


@given(st.lists(tokens, max_size=30))
def test_any_tokens_match_the_tokenizer(token_ids: list[int]) -> None:
    detokenizer = new_detokenizer()
    parts = [detokenizer.add(token) for token in token_ids]
    known_tokens = [token for token in token_ids if token != UNKNOWN]
    assert "".join(parts) + detokenizer.flush() == decode(known_tokens)


@pytest.mark.slow
@given(st.text(min_size=1))
def test_character_is_streamed_with_its_last_byte(text: str) -> None:
    tokenizer = cut_bytes()
    detokenizer = new_detokenizer()
    character_of_byte = {byte: character for character, byte in BYTE_OF.items()}
    for character in text:
        *early, last = (
            detokenizer.add(tokenizer.convert_tokens_to_ids(character_of_byte[byte]))
            for byte in character.encode()
        )
        assert early == [""] * len(early)
        assert last == character
    assert detokenizer.flush() == ""


def test_added_tokens_are_streamed_unchanged() -> None:
    ids = cut_bytes().convert_tokens_to_ids(["héllo wörld", "<|tool|>", " spaced "])
    detokenizer = new_detokenizer()
    assert "".join(map(detokenizer.add, ids)) == decode(ids)
    assert "tool" not in decode(ids)
