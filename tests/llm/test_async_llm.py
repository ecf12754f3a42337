"""Streams of ``AsyncLLM``: each task gets its tokens, whatever else is served."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EnginePath
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
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request


@pytest.mark.parametrize(
    "config", [{}, {"kv_cache_tokens": 64, "block_size": 4}, {"max_batch_size": 2}], ids=str
)
def test_concurrent_streams_match_generate(device: str, config: dict[str, Any]) -> None:
    llm = small_llm(device, **config)
    outputs = llm.generate(TEXTS, greedy(), progress=False)
    with serving(llm) as served:

        async def all_at_once() -> list[list[Update]]:
            return await asyncio.gather(*(collect(served, text) for text in TEXTS))

        streams = run(all_at_once())
    for output, updates in zip(outputs, streams, strict=True):
        assert tokens_of(updates) == output.token_ids
        assert output.token_ids == expected(device, str(output.prompt))
        assert "".join(update.text for update in updates) == output.text
        assert updates[-1].request.finish_reason == output.finish_reason
    assert llm.engine.path_counts[EnginePath.BATCHED] > 0


def test_generate_returns_the_finished_request(device: str) -> None:
    with serving(small_llm(device)) as served:
        request: Request = run(served.generate(TEXTS[0], greedy()))
    assert request.token_ids == expected(device, TEXTS[0])
    assert request.finish_reason == "length"


def test_later_stream_joins_the_batch(device: str) -> None:
    llm = small_llm(device)
    with serving(llm) as served:

        async def second_after_first_token() -> list[list[Update]]:
            later: asyncio.Task[list[Update]] | None = None
            first = []
            async for update in served.stream(TEXTS[0], greedy(60, ignore_eos=True)):
                first.append(update)
                later = later or asyncio.create_task(collect(served, TEXTS[1]))
            assert later is not None
            return [first, await later]

        first, second = run(second_after_first_token())
    assert tokens_of(second) == expected(device, TEXTS[1])
    assert len(first) == 60
    assert llm.engine.path_counts[EnginePath.MIXED] > 0


def test_stream_yields_tokens_while_the_request_runs(device: str) -> None:
    """Tokens arrive one by one, not all of them when the request ends."""
    with serving(small_llm(device)) as served:

        async def running_at_each_token() -> list[bool]:
            return [
                update.request.finish_reason is None
                async for update in served.stream(TEXTS[0], greedy(200, ignore_eos=True))
            ]

        running = run(running_at_each_token())
    assert len(running) == 200
    assert running[0]
    assert not running[-1]


def test_slow_reader_gets_all_tokens(device: str) -> None:
    """The request ends long before its first token is read."""
    llm = small_llm(device)
    with serving(llm) as served:

        async def read_late() -> list[int | None]:
            tokens = []
            async for update in served.stream(TEXTS[0], greedy()):
                tokens.append(update.token_id)
                while llm.engine.has_work:
                    await asyncio.sleep(0.001)
            return tokens

        assert run(read_late()) == expected(device, TEXTS[0])


def test_two_event_loops_in_two_threads(device: str) -> None:
    updates_by_thread: dict[int, list[list[Update]]] = {}
    with serving(small_llm(device)) as served:

        async def all_texts() -> list[list[Update]]:
            return await asyncio.gather(*(collect(served, text) for text in TEXTS))

        def serve(number: int) -> None:
            updates_by_thread[number] = run(all_texts())

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    for number in range(2):
        tokens = [tokens_of(updates) for updates in updates_by_thread[number]]
        assert tokens == [expected(device, text) for text in TEXTS]


def test_one_event_loop_after_another(device: str) -> None:
    """The first task ends without having read its stream to the end."""
    with serving(small_llm(device)) as served:

        async def read_one() -> Update:
            return await anext(served.stream(TEXTS[0], greedy(500)))

        first: Update = run(read_one())
        second: Request = run(served.generate(TEXTS[1], greedy()))
    assert first.request.finish_reason == "cancelled"
    assert second.token_ids == expected(device, TEXTS[1])
