"""Stop strings: a text ends at the same one however it is cut into pieces."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roseinfer import BadArgument
from roseinfer.text.completion_text import StopStringMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=5)
PIECES = st.lists(st.text(alphabet="ab\nc", max_size=6), max_size=12)
without_deadline = settings(deadline=None, database=None)


def naive(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Return the text before the stop string that ends first, the longest of those ending there."""
    for end in range(len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, matches))], True
    return text, False


def withheld_length(stops: Sequence[str], text: str) -> int:
    """Return the length of the longest suffix that could begin a stop string."""
    lengths = range(len(text) + 1)
    return max(n for n in lengths if any(stop.startswith(text[len(text) - n :]) for stop in stops))


def feed_all(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, bool]:
    matcher = StopStringMatcher(stops)
    matched = False
    streamed_text = ""
    for piece in pieces:
        new, matched = matcher.feed(piece)
        streamed_text += new
    return streamed_text + matcher.flush(), matched


@without_deadline
@given(STOPS, PIECES)
@example(["abcd", "bc"], ["a", "bcd"])
@example(["b", "ab", "aab"], ["caa", "b"])
@example(["aab"], ["aa", "aa", "b"])
@example(["abab"], ["aba", "a", "bab"])
def test_result_is_independent_of_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = naive(stops, text)
    assert feed_all(stops, pieces) == expected
    assert feed_all(stops, text) == expected
    assert feed_all(stops, [text]) == expected


@without_deadline
@given(STOPS.filter(bool), PIECES)
def test_only_possible_stop_string_prefixes_are_withheld(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopStringMatcher(stops)
    text = streamed_text = ""
    for piece in pieces:
        new, matched = matcher.feed(piece)
        streamed_text, text = streamed_text + new, text + piece
        if matched:
            break
        assert streamed_text == text[: len(text) - withheld_length(stops, text)]


def test_text_passes_without_stop_strings() -> None:
    matcher = StopStringMatcher([])
    assert matcher.feed("some") == ("some", False)
    assert matcher.feed("") == ("", False)
    assert matcher.flush() == ""


def test_first_complete_and_longest_stop_string_matches() -> None:
    assert feed_all(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert feed_all(["c", "bc", "abc"], ["xabcd"]) == ("x", True)
    assert feed_all(["a", "ab"], ["xab"]) == ("x", True)


def test_no_text_follows_a_stop_string() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("some EN") == ("some ", False)
    assert matcher.feed("D and more") == ("", True)
    assert matcher.feed("yet more") == ("", True)
    assert matcher.flush() == ""


def test_incomplete_stop_string_is_flushed() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("the EN") == ("the ", False)
    assert [matcher.flush(), matcher.flush()] == ["EN", ""]
    assert matcher.feed("D") == ("D", False)


@pytest.mark.parametrize("stops", ["END", ["END", ""]])
def test_invalid_stop_strings_are_rejected(stops: Sequence[str]) -> None:
    with pytest.raises(BadArgument, match="must be a list of texts"):
        StopStringMatcher(stops)


# ------------------------------------------------------------------------------------------ cost


def count_lines(stops: Sequence[str], pieces: Sequence[str]) -> int:
    """Count the executed lines of Python, a cost that needs no clock."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    matcher = StopStringMatcher(stops)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for piece in pieces:
            matcher.feed(piece)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", ["a" * 4000, ("a" * 199 + "c") * 20, "ab" * 2000])
@pytest.mark.parametrize("length", [1, 7, 4000])
def test_cost_per_character_is_independent_of_stop_strings(text: str, length: int) -> None:
    """This holds even if every character could begin all of them, and none matches."""
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    similar_stops = ["a" * n + "b" + "a" * 100 for n in range(100, 200, 10)]
    assert count_lines(similar_stops, pieces) < 20 * len(text)


@pytest.mark.parametrize("length", [1, 50])
def test_withheld_text_is_bounded(length: int) -> None:
    matcher = StopStringMatcher(["a" * 30 + "b"])
    streamed_text = sum(len(matcher.feed("a" * length)[0]) for _ in range(100))
    assert 100 * length - streamed_text == 30
