"""Unread streams: they hold a bounded number of tokens, and delay no other stream."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import aclosing
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EngineStopped, engine_thread
from roseinfer import llm as llm_file
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.llm.served_streams import (
    PATIENCE,
    TEXTS,
    collect,
    expected,
    greedy,
    run,
    serving,
    small_llm,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from roseinfer import AsyncLLM
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

MAX_UNREAD = 8
"""Maximum number of updates that an unread stream holds in these tests, besides those in flight."""
LONG_COMPLETION = 40
"""Tokens of a completion longer than an unread stream holds."""
NO_LAG: dict[str, Any] = {"resident_decode": True, "run_ahead": 0, "cuda_graph": False}
Stream = Any
all_lags = pytest.mark.parametrize("lag", [0, 3])


@pytest.fixture(autouse=True)
def _small_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_thread, llm_file):
        monkeypatch.setattr(module, "MAX_UNREAD_UPDATES", MAX_UNREAD)
        monkeypatch.setattr(module, "RESUME_UNREAD_UPDATES", MAX_UNREAD // 2)


def long_params(**more: Any) -> Any:
    return greedy(LONG_COMPLETION, ignore_eos=True, **more)


@cache
def expected_completion(device: str, text: str) -> list[int]:
    (output,) = small_llm(device, **NO_LAG).generate(text, long_params(), progress=False)
    return output.token_ids


async def open_stream(served: AsyncLLM, text: str, params: Any = None) -> tuple[Stream, Update]:
    """Read a stream's first token, and wait until the engine adds no more."""
    stream: AsyncGenerator[Update, None] = served.stream(text, params or long_params())
    first = await anext(stream)
    await await_idle(served)
    return stream, first


async def await_idle(served: AsyncLLM) -> None:
    """Wait until the engine is idle, checked twice, since one check may fall between two steps."""
    for _ in range(2):
        while served._llm.engine.has_work or served._thread._tasks.qsize():
            await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------ memory held


@all_lags
def test_unread_stream_is_paused_at_its_limit(device: str, lag: int) -> None:
    """The paused request holds no blocks; when it is read again it continues as if alone."""
    llm = small_llm(device, resident_decode=True, run_ahead=lag, cuda_graph=False)
    with serving(llm) as served:

        async def read_after_pause() -> tuple[int, list[int | None]]:
            stream, first = await open_stream(served, TEXTS[0])
            num_generated_unread = first.request.num_generated
            assert_no_block_is_lost(llm)
            return num_generated_unread, tokens_of([first, *[update async for update in stream]])

        num_generated_unread, tokens = run(read_after_pause())
    assert MAX_UNREAD < num_generated_unread <= 1 + MAX_UNREAD + lag
    assert tokens == expected_completion(device, TEXTS[0])


def test_stream_of_a_blocked_event_loop_is_paused(device: str) -> None:
    """Updates that wait for a blocked event loop count as unread."""
    llm = small_llm(device, **NO_LAG)
    with serving(llm) as served:

        async def block() -> tuple[int, list[int | None]]:
            stream = served.stream(TEXTS[0], long_params())
            first = await anext(stream)
            end = time.monotonic() + PATIENCE
            while llm.engine.has_work:
                assert time.monotonic() < end, "the request is not paused"
                time.sleep(0.001)
            num_generated_unread = first.request.num_generated
            return num_generated_unread, tokens_of([first, *[update async for update in stream]])

        num_generated_unread, tokens = run(block())
    assert num_generated_unread <= 1 + MAX_UNREAD
    assert tokens == expected_completion(device, TEXTS[0])


@pytest.mark.slow
def test_pausing_readers_get_all_tokens(device: str) -> None:
    """Many readers pause at different times, on a cache that is too small for all of them."""
    llm = small_llm(device, **NO_LAG, kv_cache_tokens=128, block_size=4, max_batch_size=3)
    with serving(llm) as served:

        async def read(number: int) -> list[int | None]:
            tokens = []
            async for update in served.stream(TEXTS[number], long_params()):
                tokens.append(update.token_id)
                if len(tokens) % (number + 3) == 0:
                    await asyncio.sleep(0.002 * number)
            return tokens

        async def read_all() -> list[list[int | None]]:
            return await asyncio.gather(*(read(number) for number in range(len(TEXTS))))

        tokens_read = run(read_all())
    assert tokens_read == [expected_completion(device, text) for text in TEXTS]


def test_reader_returns_while_its_request_is_being_paused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader reads everything before it knows of the pause, and so does not resume it."""
    llm = small_llm(device, **NO_LAG)
    pausing, all_read = threading.Event(), threading.Event()
    pause = llm.engine.pause

    def slow_pause(request: Request) -> None:
        pausing.set()
        assert all_read.wait(PATIENCE)
        pause(request)

    monkeypatch.setattr(llm.engine, "pause", slow_pause)
    with serving(llm) as served:

        async def read() -> list[int | None]:
            stream = served.stream(TEXTS[0], long_params())
            tokens = [(await anext(stream)).token_id]
            await asyncio.to_thread(pausing.wait, PATIENCE)
            tokens += [(await anext(stream)).token_id for _ in range(MAX_UNREAD)]
            all_read.set()
            return tokens + [update.token_id async for update in stream]

        try:
            assert run(read()) == expected_completion(device, TEXTS[0])
        finally:
            all_read.set()


# ------------------------------------------------------------------------------ other streams


def test_unread_streams_delay_no_other_stream(device: str) -> None:
    """There are more unread streams than may run at once, each of which used most of the cache."""
    llm = small_llm(device, max_batch_size=2, kv_cache_tokens=64, block_size=4)
    with serving(llm) as served:

        async def collect_with_unread_streams() -> list[int | None]:
            unread = [await open_stream(served, text) for text in TEXTS[:4]]
            tokens_read = tokens_of(await collect(served, TEXTS[4]))
            for stream, first in unread:
                assert first.request.finish_reason is None
                await stream.aclose()
            return tokens_read

        assert run(collect_with_unread_streams()) == expected(device, TEXTS[4])


# --------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("how", ["closed", "dropped", "task cancelled"])
def test_leaving_an_unread_stream_cancels_its_request(device: str, how: str) -> None:
    llm = small_llm(device, **NO_LAG)
    with serving(llm) as served:

        async def cancel() -> Request:
            stream, first = await open_stream(served, TEXTS[0])
            if how == "closed":
                await stream.aclose()
            elif how == "dropped":
                del stream
                gc.collect()
            else:

                async def hold(stream: Stream) -> None:
                    async with aclosing(stream):
                        await asyncio.sleep(PATIENCE)

                task = asyncio.create_task(hold(stream))
                del stream
                await asyncio.sleep(0)
                task.cancel()
            while first.request.finish_reason is None:
                await asyncio.sleep(0.001)
            assert not served._thread._paused_listeners
            return first.request

        assert run(cancel()).finish_reason == "cancelled"


def test_closing_ends_an_unread_stream(device: str) -> None:
    """Updates that had arrived can still be read."""
    with serving(small_llm(device, **NO_LAG)) as served:

        async def close_and_read() -> tuple[int, Any]:
            stream, _ = await open_stream(served, TEXTS[0])
            served.close()
            count = 0
            try:
                async for _ in stream:
                    count += 1
            except EngineStopped as error:
                return count, error
            raise AssertionError("the stream ended without an error")

        count, error = run(close_and_read())
    assert count == MAX_UNREAD
    assert "closed" in str(error)


def test_closed_event_loop_of_an_unread_stream_is_detected(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream will never be read, and no later step notices that."""
    monkeypatch.setattr(engine_thread, "_POLL_S", 0.01)
    with serving(small_llm(device, **NO_LAG)) as served:
        loop = asyncio.new_event_loop()
        stream, first = loop.run_until_complete(open_stream(served, TEXTS[0]))
        loop.close()
        end = time.monotonic() + PATIENCE
        while first.request.finish_reason is None:
            assert time.monotonic() < end, "the request waits forever"
            time.sleep(0.001)
        assert first.request.finish_reason == "cancelled"
        assert not served._thread._listeners
        del stream


# ------------------------------------------------------------------------------ without asyncio


def test_unread_stream_of_an_llm_is_paused(device: str) -> None:
    llm = small_llm(device, **NO_LAG)
    slow = llm.stream(TEXTS[0], long_params())
    first = next(slow)
    for text in TEXTS[1:3]:
        (output,) = llm.generate(text, long_params(), progress=False)
        assert output.token_ids == expected_completion(device, text)
    assert first.request.num_generated == 1 + MAX_UNREAD
    tokens = [first.token_id]
    for update in slow:
        tokens.append(update.token_id)
        if len(tokens) == 20:
            llm.generate(TEXTS[1], long_params(), progress=False)
    assert tokens == expected_completion(device, TEXTS[0])
    assert_no_block_is_lost(llm)


def test_unread_stream_of_an_llm_can_be_closed(device: str) -> None:
    llm = small_llm(device, **NO_LAG)
    slow = llm.stream(TEXTS[0], long_params())
    request = next(slow).request
    llm.generate(TEXTS[1], long_params(), progress=False)
    slow.close()
    assert request.finish_reason == "cancelled"
    assert_no_block_is_lost(llm)
