"""Streams for tasks: whatever they do, nobody waits for ever and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import (
    LLM,
    AsyncLLM,
    BadArgument,
    EnginePath,
    EngineStopped,
    NoDistribution,
    RequestTooLarge,
    RoseinferError,
    SamplingParams,
    tiny_gpt2,
)
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from roseinfer.engine import Update
    from roseinfer.request import Request

TEXTS = [f"The {word} fox" for word in ("quick", "brown", "lazy", "red", "old", "grey", "third")]
PATIENCE = 20
"""Seconds after which something that hangs is given up."""


def greedy(count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, **more)


def small_llm(device: str, **config: Any) -> LLM:
    return LLM("tiny", device=device, dtype="float32", **{"kv_cache_tokens": 1024} | config)


@contextmanager
def serving(llm: LLM) -> Iterator[AsyncLLM]:
    """Closed in the end; then nothing may be left in the engine."""
    served = AsyncLLM(llm)
    try:
        yield served
    finally:
        served.close()
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


def run(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(what, PATIENCE))


@cache
def expected(device: str, text: str, count: int = 12) -> list[int]:
    """Generated alone, and compared with transformers elsewhere."""
    (output,) = small_llm(device, prefix_cache=False).generate(text, greedy(count), progress=False)
    return output.token_ids


async def collect(
    served: AsyncLLM, prompt: Any, params: SamplingParams | None = None
) -> list[Update]:
    return [update async for update in served.stream(prompt, params or greedy())]


def tokens_of(updates: list[Update]) -> list[int | None]:
    return [update.token_id for update in updates]


# ------------------------------------------------------------------------------- together


@pytest.mark.parametrize(
    "config", [{}, {"kv_cache_tokens": 64, "block_size": 4}, {"max_batch_size": 2}], ids=str
)
def test_streams_at_the_same_time_are_what_generate_returns(
    device: str, config: dict[str, Any]
) -> None:
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


def test_generate_waits_for_the_end(device: str) -> None:
    with serving(small_llm(device)) as served:
        request: Request = run(served.generate(TEXTS[0], greedy()))
    assert request.token_ids == expected(device, TEXTS[0])
    assert request.finish_reason == "length"


def test_a_stream_that_comes_later_joins_in(device: str) -> None:
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


def test_a_stream_gets_a_token_from_every_step(device: str) -> None:
    """Not all of them when it is over."""
    with serving(small_llm(device)) as served:

        async def seen_while_running() -> list[bool]:
            return [
                update.request.finish_reason is None
                async for update in served.stream(TEXTS[0], greedy(200, ignore_eos=True))
            ]

        running = run(seen_while_running())
    assert len(running) == 200
    assert running[0]
    assert not running[-1]


def test_a_slow_reader_misses_nothing(device: str) -> None:
    """The request has ended long before its first token is read."""
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


def test_two_loops_in_two_threads(device: str) -> None:
    found: dict[int, list[list[Update]]] = {}
    with serving(small_llm(device)) as served:

        async def all_texts() -> list[list[Update]]:
            return await asyncio.gather(*(collect(served, text) for text in TEXTS))

        def serve(number: int) -> None:
            found[number] = run(all_texts())

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    for number in range(2):
        tokens = [tokens_of(updates) for updates in found[number]]
        assert tokens == [expected(device, text) for text in TEXTS]


def test_one_loop_after_another(device: str) -> None:
    """The first ends without having read its stream to the end."""
    with serving(small_llm(device)) as served:

        async def take_one() -> Update:
            return await anext(served.stream(TEXTS[0], greedy(500)))

        first: Update = run(take_one())
        second: Request = run(served.generate(TEXTS[1], greedy()))
    assert first.request.finish_reason == "cancelled"
    assert second.token_ids == expected(device, TEXTS[1])


# -------------------------------------------------------------------------------- leaving


def test_leaving_early_cancels(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def leave() -> tuple[Request, Request]:
            other = asyncio.create_task(served.generate(TEXTS[1], greedy()))
            async with aclosing(served.stream(TEXTS[0], greedy(900))) as stream:
                async for update in stream:
                    if update.request.num_generated >= 3:
                        break
            return update.request, await other

        left, other = run(leave())
    assert left.finish_reason == "cancelled"
    assert left.num_generated < 900
    assert other.token_ids == expected(device, TEXTS[1])


def test_forgetting_a_stream_cancels(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def forget() -> Request:
            async for update in served.stream(TEXTS[0], greedy(900, ignore_eos=True)):
                request = update.request
                break
            gc.collect()
            await served.generate(TEXTS[1], greedy())
            return request

        assert run(forget()).finish_reason == "cancelled"


@pytest.mark.parametrize("queued", [False, True])
def test_a_task_that_is_cancelled_cancels(device: str, queued: bool) -> None:
    """While it runs, and while it waits behind another."""
    llm = small_llm(device, max_batch_size=1)
    with serving(llm) as served:

        async def cancel() -> Request:
            first = asyncio.create_task(served.generate(TEXTS[0], greedy(60, ignore_eos=True)))
            second = asyncio.create_task(served.generate(TEXTS[1], greedy(900)))
            while llm.engine.num_running + llm.engine.num_waiting < 2:
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


def test_many_come_and_go(device: str) -> None:
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

        async def all_of_them() -> list[bool]:
            return await asyncio.gather(*(use(number) for number in range(40)))

        finished = run(all_of_them())
    assert sum(finished) >= 26
    assert not all(finished)


# --------------------------------------------------------------------------------- errors


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
    ids=["empty", "unknown", "too long", "words", "fraction", "nothing", "half a character"],
)
def test_a_bad_prompt_is_told_why_and_the_others_go_on(
    device: str, bad: Any, error: type[Exception]
) -> None:
    with serving(small_llm(device)) as served:

        async def beside_others() -> Any:
            return await asyncio.gather(
                collect(served, TEXTS[0]),
                collect(served, bad),
                collect(served, TEXTS[1]),
                return_exceptions=True,
            )

        first, refused, second = run(beside_others())
    assert isinstance(refused, error)
    assert tokens_of(first) == expected(device, TEXTS[0])
    assert tokens_of(second) == expected(device, TEXTS[1])


def test_logits_that_are_not_numbers_end_their_stream_only(device: str) -> None:
    model = tiny_gpt2(device)
    model.model.transformer.wte.weight[ord("#")] = float("nan")
    llm = LLM(model.model, tokenizer=model.tokenizer, device=device, kv_cache_tokens=512)
    with serving(llm) as served:

        async def beside_others() -> Any:
            return await asyncio.gather(
                collect(served, TEXTS[0]), collect(served, "a#"), return_exceptions=True
            )

        first, broken = run(beside_others())
    assert isinstance(broken, NoDistribution)
    assert tokens_of(first) == expected(device, TEXTS[0])


def test_an_exception_in_a_step_reaches_every_stream(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=False)
    extend = llm.engine.sessions.extend
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("the GPU fell off")
        return extend(*arguments)

    monkeypatch.setattr(llm.engine.sessions, "extend", broken)
    with serving(llm) as served:

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(
                *(collect(served, text, greedy(50, ignore_eos=True)) for text in TEXTS),
                return_exceptions=True,
            )

        ends = run(all_at_once())
        assert [repr(end) for end in ends] == [repr(RuntimeError("the GPU fell off"))] * len(TEXTS)
        with pytest.raises(EngineStopped):
            run(collect(served, TEXTS[0]))


# -------------------------------------------------------------------------------- closing


def test_closing_ends_open_streams(device: str) -> None:
    llm = small_llm(device)
    with serving(llm) as served:

        async def close_among_them() -> list[Any]:
            tasks = [
                asyncio.create_task(collect(served, text, greedy(900, ignore_eos=True)))
                for text in TEXTS[:3]
            ]
            while llm.engine.num_running < 3:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(served.close)
            return await asyncio.gather(*tasks, return_exceptions=True)

        ends = run(close_among_them())
    assert [type(end) for end in ends] == [EngineStopped] * 3


def test_closing_from_the_loop_itself_ends_open_streams(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def close_while_reading() -> None:
            async for _ in served.stream(TEXTS[0], greedy(900, ignore_eos=True)):
                served.close()

        with pytest.raises(EngineStopped):
            run(close_while_reading())


def test_what_was_asked_for_just_before_closing_ends_too(device: str) -> None:
    with serving(small_llm(device)) as served:

        async def ask_and_close() -> Any:
            task = asyncio.create_task(collect(served, TEXTS[0], greedy(900, ignore_eos=True)))
            await asyncio.sleep(0)
            served.close()
            return (await asyncio.gather(task, return_exceptions=True))[0]

        assert isinstance(run(ask_and_close()), EngineStopped)


@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_served_after_closing(device: str, used: bool) -> None:
    with serving(small_llm(device)) as served:
        if used:
            run(collect(served, TEXTS[0]))
        for _ in range(2):
            served.close()
            with pytest.raises(EngineStopped, match="closed"):
                run(collect(served, TEXTS[0]))


def test_closing_leaves_no_thread_and_gives_the_model_back(device: str) -> None:
    llm = small_llm(device)
    before = threading.active_count()
    with serving(llm) as served:
        run(collect(served, TEXTS[0]))
        # asyncio.run ends its own threads; the engine's is left.
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    (output,) = llm.generate(TEXTS[0], greedy(), progress=False)
    assert output.token_ids == expected(device, TEXTS[0])


def test_the_engine_is_never_touched_while_it_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task is cancelled while ``close`` waits for a step that takes its time."""
    llm = small_llm(device)
    step, cancel = llm.engine.step, llm.engine.cancel
    stepping, go_on = threading.Event(), threading.Event()
    touched = []

    def slow_step() -> list[Update]:
        stepping.set()
        assert go_on.wait(PATIENCE)
        try:
            return step()
        finally:
            stepping.clear()

    def watched_cancel(request: Request) -> None:
        touched.append(stepping.is_set())
        cancel(request)

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine, "cancel", watched_cancel)
    with serving(llm) as served:

        async def cancel_while_closing() -> None:
            task = asyncio.create_task(collect(served, TEXTS[0]))
            await asyncio.to_thread(stepping.wait)
            closing = asyncio.create_task(asyncio.to_thread(served.close))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            await closing

        try:
            run(cancel_while_closing())
        finally:
            go_on.set()
    assert touched
    assert not any(touched)
