"""How many stop strings there may be and how long, and that nobody waits for another's."""

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

MOST = ["never" * 51 + chr(ord("a") + number % 26) for number in range(32)]
"""As many as there may be, each as long as it may be."""


def test_as_many_and_as_long_as_may_be() -> None:
    assert {len(stop) for stop in MOST} == {256}
    assert SamplingParams(stop=tuple(MOST)).stop == tuple(MOST)


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        ([*MOST, "x"], "stop has 33 strings; at most 32 are"),
        ("abc" * 11, "must be a list of strings"),
        (["y", "x" * 257], "stop has a string of 257 characters; at most 256 are"),
        (["x" * 1_000_000], "stop has a string of 1000000 characters"),
    ],
    ids=["too many", "one text", "too long", "far too long"],
)
def test_more_are_refused_by_name(stops: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        SamplingParams(stop=stops)
    assert len(str(refused.value)) < 200, "it does not repeat a megabyte"


def test_a_list_cannot_grow_once_it_was_checked() -> None:
    stops = ["END"]
    params = SamplingParams(stop=stops)  # type: ignore[arg-type]
    stops += MOST
    assert params.stop == ("END",)


def test_stop_strings_are_prepared_by_the_task_that_asks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread has all other streams to serve meanwhile."""
    prepare = StopStringMatcher.__init__
    threads: list[threading.Thread] = []

    def watched(self: StopStringMatcher, stops: Sequence[str]) -> None:
        threads.append(threading.current_thread())
        prepare(self, stops)

    monkeypatch.setattr(StopStringMatcher, "__init__", watched)
    with serving(small_llm(device)) as served:

        async def both() -> Any:
            stops = greedy(stop=tuple(MOST))
            return await asyncio.gather(collect(served, TEXTS[0], stops), collect(served, TEXTS[1]))

        first, second = run(both())
    assert threads == [threading.main_thread()]
    assert [tokens(first), tokens(second)] == [expected(device, text) for text in TEXTS[:2]]
