"""Detokenization by windows of tokens, compared with decoding all tokens at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roseinfer.models.tiny import byte_tokenizer
from roseinfer.text.detokenizer import WindowDetokenizer
from tests.text.tokenizers import (
    SAMPLE,
    SPECIAL,
    UNKNOWN,
    all_cuts,
    byte_level,
    metaspace,
    word_ends,
    word_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

R = "\N{REPLACEMENT CHARACTER}"
CUTS = all_cuts()
SPACED = ("▁", "▁▁", "▁the", "The", "▁cat", "s", "é", "好", "\n", ".", "▁n't", R)
WORDS = ("the</w>", "ca", "ts</w>", ".</w>", "n't</w>", "</w>", "好")
MORE_WORDS = ("the", "cat", "##s", ".", "n't", "'", "好", "##-")

without_deadline = settings(deadline=None, database=None, max_examples=60)

plain_bytes = functools.cache(byte_tokenizer)
cut_bytes = functools.cache(lambda: byte_level(CUTS))
spaced = functools.cache(lambda: metaspace(SPACED))


def decode_whole(tokenizer: Any, tokens: Iterable[int]) -> str:
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def stream_groups(tokenizer: Any, groups: Iterable[list[int]]) -> list[str]:
    """Return the text of each group, and then that of ``flush``."""
    detokenizer = WindowDetokenizer(tokenizer)
    return [*["".join(map(detokenizer.add, group)) for group in groups], detokenizer.flush()]


def stream_tokens(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    return stream_groups(tokenizer, [[token] for token in tokens])


def joined(groups: Iterable[list[int]]) -> list[int]:
    return [token for group in groups for token in group]


def cut(text: str, lengths: Iterable[int]) -> list[int]:
    """Return the tokens of ``cut_bytes`` for a text cut into pieces of these numbers of bytes."""
    rest, pieces = text.encode(), []
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    pieces += [bytes([byte]) for byte in rest]
    return [CUTS.index(each) + 1 for each in pieces if each]


def piece(text: str) -> int:
    return 1 + SPACED.index(text)


def token_groups(tokens: Any, max_size: int = 80) -> Any:
    """Build a strategy of tokens in random groups, with special and unknown ones anywhere."""
    either = st.one_of(tokens, tokens, tokens, st.sampled_from([SPECIAL, UNKNOWN]))
    return st.lists(st.lists(either, max_size=4), max_size=max_size // 2)


# ------------------------------------------------------------------------------ valid texts

TEXTS = st.text(max_size=40) | st.text(
    alphabet="e\u0301\u0308ü👩🏽\u200d🔬한글漢字 \n", max_size=30
)


@pytest.mark.slow
@without_deadline
@given(TEXTS)
def test_text_streamed_by_bytes_is_unchanged(text: str) -> None:
    assert "".join(stream_tokens(plain_bytes(), text.encode())) == text


@without_deadline
@given(text=TEXTS.filter(lambda text: R not in text))
def test_characters_are_streamed_whole_with_their_last_byte(text: str) -> None:
    detokenizer = WindowDetokenizer(plain_bytes())
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.add(token) for token in first] == [""] * len(first)
        assert detokenizer.add(last) == character
    assert detokenizer.flush() == ""


@without_deadline
@given(text=st.text(alphabet=SAMPLE, max_size=60), lengths=st.lists(st.integers(1, 3)))
@example(text="好" * 60, lengths=[2] + [3] * 58)
@example(text="好" * 60, lengths=[1] + [3] * 58)
@example(text="😀" * 40, lengths=[3, 1] * 40)
@example(text="😀好a" * 20, lengths=[2, 3] * 40)
def test_tokens_that_end_within_characters(text: str, lengths: list[int]) -> None:
    """Nearly every token of the first examples ends within a character."""
    tokens = cut(text, lengths)
    detokenizer = WindowDetokenizer(cut_bytes())
    streamed_text = ""
    for at, token in enumerate(tokens, 1):
        streamed_text += detokenizer.add(token)
        assert streamed_text == decode_whole(cut_bytes(), tokens[:at]).rstrip(R)
    assert streamed_text == text
    assert detokenizer.flush() == ""


def test_replacement_characters_of_the_text_are_streamed() -> None:
    text = f"{R}a{R}{R}b" + R * 30
    assert "".join(stream_tokens(plain_bytes(), text.encode())) == text


# ---------------------------------------------------------------------------- invalid bytes


@without_deadline
@given(st.binary(max_size=80), st.integers(1, 7))
@example(b"\xf0\x9f\x98" * 20 + b"\xf0\x9f\x98\x80", 1)
@example(b"\xff" * 40 + "é".encode(), 1)
@example(b"\x80" * 40 + "€".encode(), 1)
@example("é".encode() + b"\xe2\x82" * 30 + "€".encode(), 2)
def test_any_bytes_match_the_tokenizer(noise: bytes, length: int) -> None:
    groups = [list(noise[at : at + length]) for at in range(0, len(noise), length)]
    expected = noise.decode(errors="replace")
    assert "".join(stream_groups(plain_bytes(), groups)) == expected


@without_deadline
@given(token_groups(st.integers(1, len(CUTS)), max_size=120))
def test_any_tokens_of_several_bytes_match_the_tokenizer(groups: list[list[int]]) -> None:
    expected = decode_whole(cut_bytes(), joined(groups))
    assert "".join(stream_groups(cut_bytes(), groups)) == expected


@without_deadline
@given(st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xFF]), max_size=60))
def test_at_most_three_characters_are_withheld(noise: list[int]) -> None:
    """Only characters that later bytes may still change are withheld."""
    detokenizer = WindowDetokenizer(plain_bytes())
    streamed_text = ""
    for at, byte in enumerate(noise, 1):
        streamed_text += detokenizer.add(byte)
        decoded = decode_whole(plain_bytes(), noise[:at])
        assert decoded.startswith(streamed_text)
        assert len(streamed_text) >= max(len(decoded.rstrip(R)), len(decoded) - 3)


def test_incomplete_bytes_at_the_end_are_replaced() -> None:
    assert stream_tokens(plain_bytes(), b"a\xe2\x82") == ["a", "", "", R]
    assert stream_tokens(plain_bytes(), b"a\xff\xe2\x82") == ["a", "", "", "", R + R]


def test_flushing_again_returns_nothing() -> None:
    detokenizer = WindowDetokenizer(plain_bytes())
    assert detokenizer.flush() == ""
    for byte in (0xE2, 0x82):
        detokenizer.add(byte)
    assert [detokenizer.flush(), detokenizer.flush()] == [R, ""]


# --------------------------------------------------------------------------------- other decoders


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("build", "pieces"),
    [
        (metaspace, SPACED),
        (word_ends, WORDS),
        (word_pieces, MORE_WORDS),
    ],
)
def test_other_decoders_match_the_tokenizer(
    build: Callable[[Any], Any], pieces: tuple[str, ...]
) -> None:
    """Spaces before, after, by words; and spaces that the tokenizer would clean up."""
    tokenizer = build(pieces)
    last = len(tokenizer)

    @without_deadline
    @given(token_groups(st.integers(last - len(pieces), last - 1)))
    def check(groups: list[list[int]]) -> None:
        expected = decode_whole(tokenizer, joined(groups))
        assert "".join(stream_groups(tokenizer, groups)) == expected

    check()


# ------------------------------------------------------------------------------------------ cost


class RecordingTokenizer:
    """Tokenizer that records the lengths of its decoded lists."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.lengths.append(len(token_ids))
        text = self._tokenizer.decode(token_ids, **options)
        assert isinstance(text, str)
        return text


ENDLESS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "text": (plain_bytes, list(b"abc")),
    "characters": (plain_bytes, list("😀".encode())),
    "invalid": (plain_bytes, [0xFF]),
    "continuations": (plain_bytes, [0x80]),
    "unfinished": (plain_bytes, [0xF0, 0x9F, 0x98]),
    "straddling": (cut_bytes, cut("😀" * 3, [2, 3, 3, 3, 1])[1:-1]),
    "replacement pieces": (spaced, [piece(R)]),
    "blanks": (spaced, [piece("▁")]),
    "special": (spaced, [SPECIAL]),
    "unknown": (spaced, [UNKNOWN, piece("s")]),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_cost_of_a_token_is_independent_of_previous_tokens(kind: str) -> None:
    build, pattern = ENDLESS[kind]
    tokens = pattern * (400 // len(pattern))
    recording = RecordingTokenizer(build())
    text = "".join(stream_tokens(recording, tokens))
    assert text == decode_whole(build(), tokens)
    assert len(recording.lengths) <= 4 * len(tokens)
    assert max(recording.lengths) <= 17 + 2 * 16


def test_common_tokens_cost_two_short_decodes() -> None:
    recording = RecordingTokenizer(spaced())
    tokens = [piece("▁the"), piece("▁cat"), piece("s")] * 100
    stream_tokens(recording, tokens)
    assert len(recording.lengths) == 2 * len(tokens)
    assert max(recording.lengths) == 3
