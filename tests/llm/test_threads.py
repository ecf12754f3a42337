"""An engine has one user at a time: others are refused, and nobody gets another's tokens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from roseinfer import AsyncLLM, BadArgument, ConfigError
from tests.engine.continuations import TEXTS, by_transformers, greedy, one, small_llm

IN_USE = "in use by another thread"


def in_another_thread(call: Any) -> Any:
    """Call it in another thread; return what it returned or raised there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found, "it never came back"
    return found[0]


def test_a_thread_that_comes_while_a_stream_is_open_is_refused(device: str) -> None:
    llm = small_llm(device)
    stream = llm.stream(TEXTS[0], greedy(ignore_eos=True))
    tokens = [next(stream).token_id]
    for call in (
        lambda: llm.generate(TEXTS[1], greedy()),
        lambda: next(llm.stream(TEXTS[1], greedy())),
    ):
        refused = in_another_thread(call)
        assert isinstance(refused, BadArgument)
        assert IN_USE in str(refused)
    tokens += [update.token_id for update in stream]
    assert tokens == by_transformers(device, TEXTS[0], 16)
    output = in_another_thread(lambda: one(llm, TEXTS[1], greedy(ignore_eos=True)))
    assert output.token_ids == by_transformers(device, TEXTS[1], 16), "the first is done with it"


def test_what_an_async_llm_serves_is_nobody_elses_until_it_is_closed(device: str) -> None:
    llm = small_llm(device)
    first, second = AsyncLLM(llm), AsyncLLM(llm)

    async def run() -> list[int | None]:
        stream = first.stream(TEXTS[0], greedy(ignore_eos=True))
        tokens = [(await anext(stream)).token_id]
        with pytest.raises(BadArgument, match=IN_USE):
            llm.generate(TEXTS[1], greedy())
        with pytest.raises(BadArgument, match=IN_USE):
            await anext(second.stream(TEXTS[1], greedy()))
        return tokens + [update.token_id async for update in stream]

    assert asyncio.run(run()) == by_transformers(device, TEXTS[0], 16)
    first.close()
    again = one(llm, TEXTS[1], greedy(ignore_eos=True))
    assert again.token_ids == by_transformers(device, TEXTS[1], 16)
    second.close()


def test_an_async_llm_of_something_else() -> None:
    with pytest.raises(ConfigError, match="AsyncLLM takes an LLM, not 'tiny'"):
        AsyncLLM("tiny")  # type: ignore[arg-type]
