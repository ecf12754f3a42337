"""An ``AsyncLLM`` that nobody has any more ends by itself, and lets its engine go."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from roseinfer import AsyncLLM
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.llm.served_streams import (
    PATIENCE,
    TEXTS,
    collect,
    expected,
    greedy,
    run,
    small_llm,
)

if TYPE_CHECKING:
    from roseinfer import LLM


def engines_running() -> int:
    return sum(thread.name == "roseinfer" for thread in threading.enumerate())


def wait_until_none_runs() -> None:
    end = time.monotonic() + PATIENCE
    while engines_running():
        assert time.monotonic() < end, "an engine's thread does not end"
        time.sleep(0.001)


def used(llm: LLM) -> AsyncLLM:
    served = AsyncLLM(llm)
    run(collect(served, TEXTS[0]))
    return served


def test_five_that_were_dropped_leave_no_thread_and_no_engine(device: str) -> None:
    """As where each request of a server makes one and closes none."""
    before = engines_running()
    kept: list[AsyncLLM] = []
    freed: list[Any] = []
    for _ in range(5):
        llm = small_llm(device)
        freed += [
            weakref.ref(each) for each in (llm, llm.engine, llm.engine.sequence_runner.kv.keys)
        ]
        kept.append(used(llm))
        del llm
    assert engines_running() == before + 5
    kept.clear()
    wait_until_none_runs()
    gc.collect()
    assert [each() for each in freed] == [None] * 15


def test_the_llm_of_one_that_was_dropped_can_be_used_again(device: str) -> None:
    llm = small_llm(device)
    used(llm)
    wait_until_none_runs()
    (output,) = llm.generate(TEXTS[1], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[1])


def test_one_that_was_never_used_is_dropped_without_a_word(device: str) -> None:
    llm = small_llm(device)
    found = weakref.ref(AsyncLLM(llm))
    assert found() is None
    assert engines_running() == 0
    (output,) = llm.generate(TEXTS[1], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[1])


def test_an_open_stream_is_read_to_its_end(device: str) -> None:
    """Nobody but the stream has the ``AsyncLLM``; when the stream has ended, nobody has it."""
    llm = small_llm(device)

    async def read() -> list[int | None]:
        stream = AsyncLLM(llm).stream(TEXTS[0], greedy())
        tokens = [(await anext(stream)).token_id]
        gc.collect()
        return tokens + [update.token_id async for update in stream]

    assert run(read()) == expected(device, TEXTS[0])
    wait_until_none_runs()
    assert_no_block_is_lost(llm)


def test_a_stream_that_is_dropped_with_it_is_cancelled(device: str) -> None:
    llm = small_llm(device)

    async def forget() -> Any:
        stream = AsyncLLM(llm).stream(TEXTS[0], greedy(900, ignore_eos=True))
        request = (await anext(stream)).request
        del stream
        gc.collect()
        while request.finish_reason is None:
            await asyncio.sleep(0.001)
        return request.finish_reason

    assert run(forget()) == "cancelled"
    wait_until_none_runs()
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)
