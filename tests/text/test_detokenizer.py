"""Text by windows of tokens is the text that the tokenizer makes of all tokens at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roseinfer import byte_tokenizer
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

unhurried = settings(deadline=None, database=None, max_examples=60)

plain_bytes = functools.cache(byte_tokenizer)
cut_bytes = functools.cache(lambda: byte_level(CUTS))
spaced = functools.cache(lambda: metaspace(SPACED))


def whole(tokenizer: Any, tokens: Iterable[int]) -> str:
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def streamed(tokenizer: Any, groups: Iterable[list[int]]) -> list[str]:
    """Return what each group returned, and then what ``flush`` did."""
    detokenizer = WindowDetokenizer(tokenizer)
    return [*["".join(map(detokenizer.add, group)) for group in groups], detokenizer.flush()]


def one_by_one(tokenizer: Any, tokens: Iterable[int]) -> list[str]:
    return streamed(tokenizer, [[token] for token in tokens])


def joined(groups: Iterable[list[int]]) -> list[int]:
    return [token for group in groups for token in group]


def cut(text: str, lengths: Iterable[int]) -> list[int]:
    """The tokens of ``cut_bytes`` for a text cut into pieces of so many bytes."""
    rest, found = text.encode(), []
    for length in lengths:
        found.append(rest[:length])
        rest = rest[length:]
    found += [bytes([byte]) for byte in rest]
    return [CUTS.index(each) + 1 for each in found if each]


def piece(text: str) -> int:
    return 1 + SPACED.index(text)


def of(tokens: Any, most: int = 80) -> Any:
    """Sequences of tokens, in random groups; special and unknown ones come anywhere."""
    either = st.one_of(tokens, tokens, tokens, st.sampled_from([SPECIAL, UNKNOWN]))
    return st.lists(st.lists(either, max_size=4), max_size=most // 2)


# ------------------------------------------------------------------------------- whole texts

TEXTS = st.text(max_size=40) | st.text(
    alphabet="e\u0301\u0308ü👩🏽\u200d🔬한글漢字 \n", max_size=30
)


@unhurried
@given(TEXTS)
def test_any_text_by_its_bytes(text: str) -> None:
    assert "".join(one_by_one(plain_bytes(), text.encode())) == text


@unhurried
@given(text=TEXTS.filter(lambda text: R not in text))
def test_every_character_comes_with_its_last_byte_and_whole(text: str) -> None:
    detokenizer = WindowDetokenizer(plain_bytes())
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.add(token) for token in first] == [""] * len(first)
        assert detokenizer.add(last) == character
    assert detokenizer.flush() == ""


@unhurried
@given(text=st.text(alphabet=SAMPLE, max_size=60), lengths=st.lists(st.integers(1, 3)))
@example(text="好" * 60, lengths=[2] + [3] * 58)
@example(text="好" * 60, lengths=[1] + [3] * 58)
@example(text="😀" * 40, lengths=[3, 1] * 40)
@example(text="😀好a" * 20, lengths=[2, 3] * 40)
def test_tokens_that_straddle_characters(text: str, lengths: list[int]) -> None:
    """Nearly every token of the first examples ends within a character, for ever."""
    tokens = cut(text, lengths)
    detokenizer = WindowDetokenizer(cut_bytes())
    returned = ""
    for at, token in enumerate(tokens, 1):
        returned += detokenizer.add(token)
        assert returned == whole(cut_bytes(), tokens[:at]).rstrip(R)
    assert returned == text
    assert detokenizer.flush() == ""


def test_a_replacement_character_that_the_text_has() -> None:
    text = f"{R}a{R}{R}b" + R * 30
    assert "".join(one_by_one(plain_bytes(), text.encode())) == text


# ---------------------------------------------------------------------------- what is no text


@unhurried
@given(st.binary(max_size=80), st.integers(1, 7))
@example(b"\xf0\x9f\x98" * 20 + b"\xf0\x9f\x98\x80", 1)
@example(b"\xff" * 40 + "é".encode(), 1)
@example(b"\x80" * 40 + "€".encode(), 1)
@example("é".encode() + b"\xe2\x82" * 30 + "€".encode(), 2)
def test_any_bytes(noise: bytes, length: int) -> None:
    groups = [list(noise[at : at + length]) for at in range(0, len(noise), length)]
    expected = noise.decode(errors="replace")
    assert "".join(streamed(plain_bytes(), groups)) == expected


@unhurried
@given(of(st.integers(1, len(CUTS)), most=120))
def test_any_tokens_of_several_bytes(groups: list[list[int]]) -> None:
    expected = whole(cut_bytes(), joined(groups))
    assert "".join(streamed(cut_bytes(), groups)) == expected


@unhurried
@given(st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xFF]), max_size=60))
def test_nothing_is_held_back_for_long(noise: list[int]) -> None:
    """Only characters that later bytes may still change are held back."""
    detokenizer = WindowDetokenizer(plain_bytes())
    returned = ""
    for at, byte in enumerate(noise, 1):
        returned += detokenizer.add(byte)
        there = whole(plain_bytes(), noise[:at])
        assert there.startswith(returned)
        assert len(returned) >= max(len(there.rstrip(R)), len(there) - 3)


def test_incomplete_bytes_at_the_end_are_replaced() -> None:
    assert one_by_one(plain_bytes(), b"a\xe2\x82") == ["a", "", "", R]
    assert one_by_one(plain_bytes(), b"a\xff\xe2\x82") == ["a", "", "", "", R + R]


def test_flushing_again_returns_nothing() -> None:
    detokenizer = WindowDetokenizer(plain_bytes())
    assert detokenizer.flush() == ""
    for byte in (0xE2, 0x82):
        detokenizer.add(byte)
    assert [detokenizer.flush(), detokenizer.flush()] == [R, ""]


# --------------------------------------------------------------------------------- other decoders


@pytest.mark.parametrize(
    ("build", "pieces"),
    [
        (metaspace, SPACED),
        (word_ends, WORDS),
        (word_pieces, MORE_WORDS),
    ],
)
def test_other_decoders(build: Callable[[Any], Any], pieces: tuple[str, ...]) -> None:
    """Spaces before, behind, by words; and spaces that the tokenizer would tidy up."""
    tokenizer = build(pieces)
    last = len(tokenizer)

    @unhurried
    @given(of(st.integers(last - len(pieces), last - 1)))
    def check(groups: list[list[int]]) -> None:
        expected = whole(tokenizer, joined(groups))
        assert "".join(streamed(tokenizer, groups)) == expected

    check()


# ------------------------------------------------------------------------------------------ cost


class Watched:
    """A tokenizer that remembers how much it was given to decode, and how often."""

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
def test_a_token_costs_no_more_for_what_came_before(kind: str) -> None:
    build, again = ENDLESS[kind]
    tokens = again * (400 // len(again))
    watched = Watched(build())
    text = "".join(one_by_one(watched, tokens))
    assert text == whole(build(), tokens)
    assert len(watched.lengths) <= 4 * len(tokens)
    assert max(watched.lengths) <= 17 + 2 * 16


def test_common_tokens_cost_two_short_decodes() -> None:
    watched = Watched(spaced())
    tokens = [piece("▁the"), piece("▁cat"), piece("s")] * 100
    one_by_one(watched, tokens)
    assert len(watched.lengths) == 2 * len(tokens)
    assert max(watched.lengths) == 3
