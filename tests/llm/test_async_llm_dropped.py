"""Dropped ``AsyncLLM`` objects: their threads end, and their engines are freed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

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


_OTHER_ENGINES: set[threading.Thread] = set()


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "roseinfer"}


@pytest.fixture(autouse=True)
def _ignore_other_engines() -> None:
    """Leave out the engines of fixtures that last for the session."""
    _OTHER_ENGINES.clear()
    _OTHER_ENGINES.update(engine_threads())


def count_engine_threads() -> int:
    return len(engine_threads() - _OTHER_ENGINES)


def await_no_engine() -> None:
    end = time.monotonic() + PATIENCE
    while count_engine_threads():
        assert time.monotonic() < end, "an engine thread does not end"
        time.sleep(0.001)


def use(llm: LLM) -> AsyncLLM:
    served = AsyncLLM(llm)
    run(collect(served, TEXTS[0]))
    return served


def test_dropped_async_llms_leave_no_thread_and_no_engine(device: str) -> None:
    """This is like a server that makes one per request and closes none."""
    before = count_engine_threads()
    servers: list[AsyncLLM] = []
    references: list[Any] = []
    for _ in range(5):
        llm = small_llm(device)
        references += [
            weakref.ref(each) for each in (llm, llm.engine, llm.engine.sequence_runner.kv.keys)
        ]
        servers.append(use(llm))
        del llm
    assert count_engine_threads() == before + 5
    servers.clear()
    await_no_engine()
    gc.collect()
    assert [each() for each in references] == [None] * 15


def test_llm_of_a_dropped_async_llm_can_be_used_again(device: str) -> None:
    llm = small_llm(device)
    use(llm)
    await_no_engine()
    (output,) = llm.generate(TEXTS[1], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[1])


def test_unused_async_llm_is_dropped(device: str) -> None:
    llm = small_llm(device)
    reference = weakref.ref(AsyncLLM(llm))
    assert reference() is None
    assert count_engine_threads() == 0
    (output,) = llm.generate(TEXTS[1], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[1])


def test_open_stream_keeps_its_async_llm(device: str) -> None:
    """Only the stream references the ``AsyncLLM``, until the stream ends."""
    llm = small_llm(device)

    async def read() -> list[int | None]:
        stream = AsyncLLM(llm).stream(TEXTS[0], greedy())
        tokens = [(await anext(stream)).token_id]
        gc.collect()
        return tokens + [update.token_id async for update in stream]

    assert run(read()) == expected(device, TEXTS[0])
    await_no_engine()
    assert_no_block_is_lost(llm)


def test_dropped_stream_is_cancelled(device: str) -> None:
    llm = small_llm(device)

    async def drop_stream() -> Any:
        stream = AsyncLLM(llm).stream(TEXTS[0], greedy(900, ignore_eos=True))
        request = (await anext(stream)).request
        del stream
        gc.collect()
        while request.finish_reason is None:
            await asyncio.sleep(0.001)
        return request.finish_reason

    assert run(drop_stream()) == "cancelled"
    await_no_engine()
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)
