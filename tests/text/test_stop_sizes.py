"""Limits of stop strings, and where they are prepared."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import ConfigError, SamplingParams
from roseinfer.text.completion_text import StopStringMatcher
from tests.llm.served_streams import TEXTS, collect, expected, greedy, run, serving, small_llm
from tests.llm.served_streams import tokens_of as tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STOPS = ["never" * 51 + chr(ord("a") + number % 26) for number in range(32)]
"""Maximum number of stop strings, each of maximum length."""


def test_maximum_of_stop_strings_is_accepted() -> None:
    assert {len(stop) for stop in MAX_STOPS} == {256}
    assert SamplingParams(stop=tuple(MAX_STOPS)).stop == tuple(MAX_STOPS)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([*MAX_STOPS, "x"], "stop has 33 strings; at most 32 are"),
        ("abc" * 11, "must be a list of strings"),
        (["y", "x" * 257], "stop has a string of 257 characters; at most 256 are"),
        (["x" * 1_000_000], "stop has a string of 1000000 characters"),
    ],
    ids=["too many", "one text", "too long", "far too long"],
)
def test_too_many_or_too_long_stop_strings_are_rejected(stops: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as rejected:
        SamplingParams(stop=stops)
    assert len(str(rejected.value)) < 200, "the message repeats the stop string"


def test_list_of_stop_strings_is_copied() -> None:
    stops = ["END"]
    params = SamplingParams(stop=stops)  # type: ignore[arg-type]
    stops += MAX_STOPS
    assert params.stop == ("END",)


def test_stop_strings_are_prepared_in_the_task(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread must serve all other streams meanwhile."""
    prepare = StopStringMatcher.__init__
    threads: list[threading.Thread] = []

    def recorded_init(self: StopStringMatcher, stops: Sequence[str]) -> None:
        threads.append(threading.current_thread())
        prepare(self, stops)

    monkeypatch.setattr(StopStringMatcher, "__init__", recorded_init)
    with serving(small_llm(device)) as served:

        async def both() -> Any:
            stops = greedy(stop=tuple(MAX_STOPS))
            return await asyncio.gather(collect(served, TEXTS[0], stops), collect(served, TEXTS[1]))

        first, second = run(both())
    assert threads == [threading.main_thread()]
    assert [tokens(first), tokens(second)] == [expected(device, text) for text in TEXTS[:2]]
