"""Use from several threads: one thread at a time, and others are rejected."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from roseinfer import AsyncLLM, BadArgument, ConfigError
from tests.engine.continuations import TEXTS, greedy, one, small_llm, transformers_continuation

IN_USE = "in use by another thread"


def run_in_thread(call: Any) -> Any:
    """Run a call in another thread; return its result or exception."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert outcomes, "the call did not return"
    return outcomes[0]


def test_second_thread_is_rejected_while_a_stream_is_open(device: str) -> None:
    llm = small_llm(device)
    stream = llm.stream(TEXTS[0], greedy(ignore_eos=True))
    tokens = [next(stream).token_id]
    for call in (
        lambda: llm.generate(TEXTS[1], greedy()),
        lambda: next(llm.stream(TEXTS[1], greedy())),
    ):
        rejected = run_in_thread(call)
        assert isinstance(rejected, BadArgument)
        assert IN_USE in str(rejected)
    tokens += [update.token_id for update in stream]
    assert tokens == transformers_continuation(device, TEXTS[0], 16)
    output = run_in_thread(lambda: one(llm, TEXTS[1], greedy(ignore_eos=True)))
    assert output.token_ids == transformers_continuation(device, TEXTS[1], 16), (
        "the first thread still uses it"
    )


def test_llm_of_an_async_llm_is_rejected_elsewhere_until_closed(device: str) -> None:
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

    assert asyncio.run(run()) == transformers_continuation(device, TEXTS[0], 16)
    first.close()
    output = one(llm, TEXTS[1], greedy(ignore_eos=True))
    assert output.token_ids == transformers_continuation(device, TEXTS[1], 16)
    second.close()


def test_async_llm_rejects_other_types() -> None:
    with pytest.raises(ConfigError, match="AsyncLLM takes an LLM, not 'tiny'"):
        AsyncLLM("tiny")  # type: ignore[arg-type]
