"""Streams that end early, by their reader, an error or ``close``: nothing is left."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import (
    LLM,
    BadArgument,
    EnginePath,
    EngineStopped,
    NoDistribution,
    RequestTooLarge,
    RoseinferError,
    tiny_gpt2,
)
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


# --------------------------------------------------------------------------- cancellation


def test_closing_a_stream_cancels_its_request(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def cancel() -> tuple[Request, Request]:
            other = asyncio.create_task(served.generate(TEXTS[1], greedy()))
            async with aclosing(served.stream(TEXTS[0], greedy(900, ignore_eos=True))) as stream:
                async for update in stream:
                    if update.request.num_generated >= 3:
                        break
            return update.request, await other

        cancelled, other = run(cancel())
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.num_generated < 900
    assert other.token_ids == expected(device, TEXTS[1])


def test_dropping_a_stream_cancels_its_request(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def drop_stream() -> Request:
            async for update in served.stream(TEXTS[0], greedy(900, ignore_eos=True)):
                request = update.request
                break
            gc.collect()
            await served.generate(TEXTS[1], greedy())
            return request

        assert run(drop_stream()).finish_reason == "cancelled"


@pytest.mark.parametrize("queued", [False, True])
def test_cancelling_a_task_cancels_its_request(device: str, queued: bool) -> None:
    """The request runs then, or waits for another one."""
    llm = small_llm(device, max_batch_size=1)
    with serving(llm) as served:

        async def cancel() -> Request:
            first = asyncio.create_task(served.generate(TEXTS[0], greedy(60, ignore_eos=True)))
            second = asyncio.create_task(served.generate(TEXTS[1], greedy(900, ignore_eos=True)))
            # The first may have ended before this sees the second: steps of a GPU are short.
            while llm.engine.num_running + llm.engine.num_waiting < 2 and not first.done():
                await asyncio.sleep(0.001)
            if not queued:
                await first
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            await first
            return await served.generate(TEXTS[2], greedy())

        last: Request = run(cancel())
    assert last.token_ids == expected(device, TEXTS[2])
    assert llm.engine.path_counts[EnginePath.CANCELLED] == 1


def test_many_streams_with_cancellations(device: str) -> None:
    llm = small_llm(device, kv_cache_tokens=96, block_size=4)
    with serving(llm) as served:

        async def use(number: int) -> bool:
            text = TEXTS[number % len(TEXTS)]
            task = asyncio.create_task(collect(served, text))
            if number % 3 == 0:
                await asyncio.sleep(0.002 * (number % 7))
                task.cancel()
            try:
                updates = await task
            except asyncio.CancelledError:
                return False
            assert tokens_of(updates) == expected(device, text)
            return True

        async def use_all() -> list[bool]:
            return await asyncio.gather(*(use(number) for number in range(40)))

        finished = run(use_all())
    assert sum(finished) >= 26
    assert not all(finished)


# --------------------------------------------------------------------------------- errors


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([], BadArgument),
        ([1, 257], BadArgument),
        ([1] * 1024, RequestTooLarge),
        (["a"], RoseinferError),
        ([1.5], RoseinferError),
        (None, RoseinferError),
        ("a\ud800", RoseinferError),
    ],
    ids=["empty", "unknown", "too long", "words", "fraction", "none", "lone surrogate"],
)
def test_bad_prompt_raises_only_in_its_stream(
    device: str, bad: Any, error: type[Exception]
) -> None:
    with serving(small_llm(device)) as served:

        async def collect_all() -> Any:
            return await asyncio.gather(
                collect(served, TEXTS[0]),
                collect(served, bad),
                collect(served, TEXTS[1]),
                return_exceptions=True,
            )

        first, rejected, second = run(collect_all())
    assert isinstance(rejected, error)
    assert tokens_of(first) == expected(device, TEXTS[0])
    assert tokens_of(second) == expected(device, TEXTS[1])


def test_nan_logits_end_only_their_stream(device: str) -> None:
    model = tiny_gpt2(device)
    model.model.transformer.wte.weight[ord("#")] = float("nan")
    llm = LLM(model.model, tokenizer=model.tokenizer, device=device, kv_cache_tokens=512)
    with serving(llm) as served:

        async def collect_all() -> Any:
            return await asyncio.gather(
                collect(served, TEXTS[0]), collect(served, "a#"), return_exceptions=True
            )

        first, broken = run(collect_all())
    assert isinstance(broken, NoDistribution)
    assert tokens_of(first) == expected(device, TEXTS[0])


# -------------------------------------------------------------------------------- closing


def test_closing_ends_open_streams(device: str) -> None:
    llm = small_llm(device)
    with serving(llm) as served:

        async def close_while_streaming() -> list[Any]:
            tasks = [
                asyncio.create_task(collect(served, text, greedy(900, ignore_eos=True)))
                for text in TEXTS[:3]
            ]
            while llm.engine.num_running < 3:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(served.close)
            return await asyncio.gather(*tasks, return_exceptions=True)

        ends = run(close_while_streaming())
    assert [type(end) for end in ends] == [EngineStopped] * 3


def test_closing_from_the_event_loop_ends_open_streams(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def close_while_reading() -> None:
            async for _ in served.stream(TEXTS[0], greedy(900, ignore_eos=True)):
                served.close()

        with pytest.raises(EngineStopped):
            run(close_while_reading())


def test_request_submitted_just_before_closing_ends(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def submit_and_close() -> Any:
            task = asyncio.create_task(collect(served, TEXTS[0], greedy(900, ignore_eos=True)))
            await asyncio.sleep(0)
            served.close()
            return (await asyncio.gather(task, return_exceptions=True))[0]

        assert isinstance(run(submit_and_close()), EngineStopped)


@pytest.mark.parametrize("used", [False, True])
def test_closed_async_llm_serves_nothing(device: str, used: bool) -> None:
    with serving(small_llm(device)) as served:
        if used:
            run(collect(served, TEXTS[0]))
        for _ in range(2):
            served.close()
            with pytest.raises(EngineStopped, match="closed"):
                run(collect(served, TEXTS[0]))


def test_closing_ends_the_thread_and_frees_the_llm(device: str) -> None:
    llm = small_llm(device)
    before = threading.active_count()
    with serving(llm) as served:
        run(collect(served, TEXTS[0]))
        # asyncio.run ends its own threads; the engine's remains.
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    (output,) = llm.generate(TEXTS[0], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[0])


def test_engine_is_not_called_during_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task is cancelled while ``close`` waits for a slow step."""
    llm = small_llm(device)
    step, cancel = llm.engine.step, llm.engine.cancel
    stepping, proceed = threading.Event(), threading.Event()
    calls_during_step = []

    def slow_step() -> list[Update]:
        stepping.set()
        assert proceed.wait(PATIENCE)
        try:
            return step()
        finally:
            stepping.clear()

    def recorded_cancel(request: Request) -> None:
        calls_during_step.append(stepping.is_set())
        cancel(request)

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine, "cancel", recorded_cancel)
    with serving(llm) as served:

        async def cancel_while_closing() -> None:
            task = asyncio.create_task(collect(served, TEXTS[0]))
            await asyncio.to_thread(stepping.wait)
            closing = asyncio.create_task(asyncio.to_thread(served.close))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            proceed.set()
            await closing

        try:
            run(cancel_while_closing())
        finally:
            proceed.set()
    assert calls_during_step
    assert not any(calls_during_step)
