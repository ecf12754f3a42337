"""A text ends at the same stop string however it is cut into pieces."""

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
unhurried = settings(deadline=None, database=None)


def naive(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The text before the stop string that ends first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def held_back(stops: Sequence[str], text: str) -> int:
    """The length of the longest end of a text that could be the beginning of a stop string."""
    lengths = range(len(text) + 1)
    return max(n for n in lengths if any(stop.startswith(text[len(text) - n :]) for stop in stops))


def fed(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, bool]:
    watch = StopStringMatcher(stops)
    met = False
    shown = ""
    for piece in pieces:
        new, met = watch.feed(piece)
        shown += new
    return shown + watch.flush(), met


@unhurried
@given(STOPS, PIECES)
@example(["abcd", "bc"], ["a", "bcd"])
@example(["b", "ab", "aab"], ["caa", "b"])
@example(["aab"], ["aa", "aa", "b"])
@example(["abab"], ["aba", "a", "bab"])
def test_any_pieces_end_as_the_whole_text_does(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = naive(stops, text)
    assert fed(stops, pieces) == expected
    assert fed(stops, text) == expected
    assert fed(stops, [text]) == expected


@unhurried
@given(STOPS.filter(bool), PIECES)
def test_no_more_is_held_back_than_must_be(stops: list[str], pieces: list[str]) -> None:
    watch = StopStringMatcher(stops)
    text = shown = ""
    for piece in pieces:
        new, met = watch.feed(piece)
        shown, text = shown + new, text + piece
        if met:
            break
        assert shown == text[: len(text) - held_back(stops, text)]


def test_without_stops_all_text_passes() -> None:
    watch = StopStringMatcher([])
    assert watch.feed("some") == ("some", False)
    assert watch.feed("") == ("", False)
    assert watch.flush() == ""


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert fed(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert fed(["c", "bc", "abc"], ["xabcd"]) == ("x", True)
    assert fed(["a", "ab"], ["xab"]) == ("x", True)


def test_nothing_follows_a_stop_string() -> None:
    watch = StopStringMatcher(["END"])
    assert watch.feed("some EN") == ("some ", False)
    assert watch.feed("D and more") == ("", True)
    assert watch.feed("yet more") == ("", True)
    assert watch.flush() == ""


def test_what_could_have_been_a_stop_string_is_not_lost() -> None:
    watch = StopStringMatcher(["END"])
    assert watch.feed("the EN") == ("the ", False)
    assert [watch.flush(), watch.flush()] == ["EN", ""]
    assert watch.feed("D") == ("D", False)


@pytest.mark.parametrize("stops", ["END", ["END", ""]])
def test_stop_strings_that_make_no_sense(stops: Sequence[str]) -> None:
    with pytest.raises(BadArgument, match="must be a list of texts"):
        StopStringMatcher(stops)


# ------------------------------------------------------------------------------------------ cost


def lines_run(stops: Sequence[str], pieces: Sequence[str]) -> int:
    """Count the lines of Python that run, a cost that needs no clock."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    watch = StopStringMatcher(stops)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for piece in pieces:
            watch.feed(piece)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", ["a" * 4000, ("a" * 199 + "c") * 20, "ab" * 2000])
@pytest.mark.parametrize("length", [1, 7, 4000])
def test_a_character_costs_the_same_whatever_the_stop_strings(text: str, length: int) -> None:
    """This holds even where every character could begin all of them, and none is met."""
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    alike = ["a" * n + "b" + "a" * 100 for n in range(100, 200, 10)]
    assert lines_run(alike, pieces) < 20 * len(text)


@pytest.mark.parametrize("length", [1, 50])
def test_what_is_held_back_stays_short(length: int) -> None:
    watch = StopStringMatcher(["a" * 30 + "b"])
    shown = sum(len(watch.feed("a" * length)[0]) for _ in range(100))
    assert 100 * length - shown == 30
