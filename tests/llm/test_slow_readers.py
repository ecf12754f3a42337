"""Streams that are not read: they hold a bounded number of tokens, and slow down nobody else."""

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

MOST = 8
"""The most updates that an unread stream holds in these tests, besides those in flight."""
LONG = 40
"""Tokens of a text that does not fit into an unread stream."""
NO_LAG: dict[str, Any] = {"resident_decode": True, "run_ahead": 0, "cuda_graph": False}
Stream = Any
lags = pytest.mark.parametrize("lag", [0, 3])


@pytest.fixture(autouse=True)
def _small_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_thread, llm_file):
        monkeypatch.setattr(module, "MAX_UNREAD_UPDATES", MOST)
        monkeypatch.setattr(module, "RESUME_UNREAD_UPDATES", MOST // 2)


def long(**more: Any) -> Any:
    return greedy(LONG, ignore_eos=True, **more)


@cache
def whole(device: str, text: str) -> list[int]:
    (output,) = small_llm(device, **NO_LAG).generate(text, long(), progress=False)
    return output.token_ids


async def begin(served: AsyncLLM, text: str, params: Any = None) -> tuple[Stream, Update]:
    """Read a stream's first token, and wait until the engine gives it no more."""
    stream: AsyncGenerator[Update, None] = served.stream(text, params or long())
    first = await anext(stream)
    await idle(served)
    return stream, first


async def idle(served: AsyncLLM) -> None:
    """Wait until the engine has nothing to do, twice, since one look may fall between two steps."""
    for _ in range(2):
        while served._llm.engine.has_work or served._thread._tasks.qsize():
            await asyncio.sleep(0.001)


# --------------------------------------------------------------------------- how much is held


@lags
def test_a_stream_that_is_not_read_holds_no_more_than_it_may(device: str, lag: int) -> None:
    """And its request holds nothing, until it is read again and goes on as if alone."""
    llm = small_llm(device, resident_decode=True, run_ahead=lag, cuda_graph=False)
    with serving(llm) as served:

        async def wait_and_read() -> tuple[int, list[int | None]]:
            stream, first = await begin(served, TEXTS[0])
            known = first.request.num_generated
            assert_no_block_is_lost(llm)
            return known, tokens_of([first, *[update async for update in stream]])

        known, tokens = run(wait_and_read())
    assert MOST < known <= 1 + MOST + lag
    assert tokens == whole(device, TEXTS[0])


def test_a_loop_that_is_busy_piles_nothing_up_either(device: str) -> None:
    """What is on its way to an event loop that does not run counts as unread."""
    llm = small_llm(device, **NO_LAG)
    with serving(llm) as served:

        async def block() -> tuple[int, list[int | None]]:
            stream = served.stream(TEXTS[0], long())
            first = await anext(stream)
            end = time.monotonic() + PATIENCE
            while llm.engine.has_work:
                assert time.monotonic() < end, "it goes on and on"
                time.sleep(0.001)
            known = first.request.num_generated
            return known, tokens_of([first, *[update async for update in stream]])

        known, tokens = run(block())
    assert known <= 1 + MOST
    assert tokens == whole(device, TEXTS[0])


def test_whatever_a_reader_does_it_misses_nothing(device: str) -> None:
    """Many readers, each with pauses of its own, on a cache that has not room for all of them."""
    llm = small_llm(device, **NO_LAG, kv_cache_tokens=128, block_size=4, max_batch_size=3)
    with serving(llm) as served:

        async def read(number: int) -> list[int | None]:
            tokens = []
            async for update in served.stream(TEXTS[number], long()):
                tokens.append(update.token_id)
                if len(tokens) % (number + 3) == 0:
                    await asyncio.sleep(0.002 * number)
            return tokens

        async def all_of_them() -> list[list[int | None]]:
            return await asyncio.gather(*(read(number) for number in range(len(TEXTS))))

        found = run(all_of_them())
    assert found == [whole(device, text) for text in TEXTS]


def test_a_reader_that_comes_while_its_request_is_being_paused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads all before it can know that the request is paused, and so asks for nothing."""
    llm = small_llm(device, **NO_LAG)
    pausing, all_read = threading.Event(), threading.Event()
    pause = llm.engine.pause

    def slowly(request: Request) -> None:
        pausing.set()
        assert all_read.wait(PATIENCE)
        pause(request)

    monkeypatch.setattr(llm.engine, "pause", slowly)
    with serving(llm) as served:

        async def read() -> list[int | None]:
            stream = served.stream(TEXTS[0], long())
            tokens = [(await anext(stream)).token_id]
            await asyncio.to_thread(pausing.wait, PATIENCE)
            tokens += [(await anext(stream)).token_id for _ in range(MOST)]
            all_read.set()
            return tokens + [update.token_id async for update in stream]

        try:
            assert run(read()) == whole(device, TEXTS[0])
        finally:
            all_read.set()


# ---------------------------------------------------------------------------------- the others


def test_streams_that_are_not_read_hold_up_nobody(device: str) -> None:
    """More of them than may run at once, each with most of the cache while it ran."""
    llm = small_llm(device, max_batch_size=2, kv_cache_tokens=64, block_size=4)
    with serving(llm) as served:

        async def beside_unread_ones() -> list[int | None]:
            unread = [await begin(served, text) for text in TEXTS[:4]]
            found = tokens_of(await collect(served, TEXTS[4]))
            for stream, first in unread:
                assert first.request.finish_reason is None
                await stream.aclose()
            return found

        assert run(beside_unread_ones()) == expected(device, TEXTS[4])


# ------------------------------------------------------------------------------------ the ends


@pytest.mark.parametrize("how", ["closed", "forgotten", "its task cancelled"])
def test_leaving_a_stream_that_was_not_read_cancels(device: str, how: str) -> None:
    llm = small_llm(device, **NO_LAG)
    with serving(llm) as served:

        async def cancel() -> Request:
            stream, first = await begin(served, TEXTS[0])
            if how == "closed":
                await stream.aclose()
            elif how == "forgotten":
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


def test_closing_ends_a_stream_that_was_not_read(device: str) -> None:
    """What had come can be read still."""
    with serving(small_llm(device, **NO_LAG)) as served:

        async def close_and_read() -> tuple[int, Any]:
            stream, _ = await begin(served, TEXTS[0])
            served.close()
            count = 0
            try:
                async for _ in stream:
                    count += 1
            except EngineStopped as error:
                return count, error
            raise AssertionError("it ended as if it had all its tokens")

        count, error = run(close_and_read())
    assert count == MOST
    assert "closed" in str(error)


def test_a_loop_that_closed_is_found_out_though_nothing_is_to_be_told(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will ever read that stream, and no step will be done that shows it."""
    monkeypatch.setattr(engine_thread, "_POLL_S", 0.01)
    with serving(small_llm(device, **NO_LAG)) as served:
        loop = asyncio.new_event_loop()
        stream, first = loop.run_until_complete(begin(served, TEXTS[0]))
        loop.close()
        end = time.monotonic() + PATIENCE
        while first.request.finish_reason is None:
            assert time.monotonic() < end, "it waits for ever"
            time.sleep(0.001)
        assert first.request.finish_reason == "cancelled"
        assert not served._thread._listeners
        del stream


# --------------------------------------------------------------------------------- without tasks


def test_a_stream_of_an_llm_that_is_not_read_is_paused_too(device: str) -> None:
    llm = small_llm(device, **NO_LAG)
    slow = llm.stream(TEXTS[0], long())
    first = next(slow)
    for text in TEXTS[1:3]:
        (output,) = llm.generate(text, long(), progress=False)
        assert output.token_ids == whole(device, text)
    assert first.request.num_generated == 1 + MOST
    tokens = [first.token_id]
    for update in slow:
        tokens.append(update.token_id)
        if len(tokens) == 20:
            llm.generate(TEXTS[1], long(), progress=False)
    assert tokens == whole(device, TEXTS[0])
    assert_no_block_is_lost(llm)


def test_an_unread_stream_of_an_llm_can_be_left(device: str) -> None:
    llm = small_llm(device, **NO_LAG)
    slow = llm.stream(TEXTS[0], long())
    request = next(slow).request
    llm.generate(TEXTS[1], long(), progress=False)
    slow.close()
    assert request.finish_reason == "cancelled"
    assert_no_block_is_lost(llm)
