"""An engine's thread that breaks down, and loops that close: nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EngineStopped
from tests.engine.served_streams import (
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
    from roseinfer import AsyncLLM
    from roseinfer.engine import Update


class Panic(BaseException):
    """As a failure of Rust comes to Python: as no ``Exception``."""


def breaking_at(call: int, real: Any, error: BaseException) -> Any:
    """``real``, but that one of its calls raises instead."""
    calls = iter(range(10_000))

    def sometimes(*args: Any) -> Any:
        if next(calls) == call:
            raise error
        return real(*args)

    return sometimes


async def ends_of_all(served: AsyncLLM, count: int = 50) -> list[Any]:
    params = greedy(count, ignore_eos=True)
    streams = (collect(served, text, params) for text in TEXTS)
    return await asyncio.gather(*streams, return_exceptions=True)


def assert_stopped_by(error: BaseException, ends: list[Any]) -> None:
    assert [type(end) for end in ends] == [EngineStopped] * len(ends)
    assert all(end.__cause__ is error for end in ends)
    assert all(f"{type(error).__name__}: {error}" in str(end) for end in ends)
    assert len(set(ends)) == len(ends), "raised twice, an exception remembers both"


# ----------------------------------------------------------------------------- the thread


@pytest.mark.parametrize("error", [Panic("unreachable"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("what", ["step", "cancel"])
def test_whatever_breaks_the_thread_ends_every_stream_with_the_cause(
    device: str, monkeypatch: pytest.MonkeyPatch, what: str, error: BaseException
) -> None:
    llm = small_llm(device)
    with serving(llm) as served:

        async def all_and_one_that_leaves() -> list[Any]:
            leaves = asyncio.create_task(collect(served, TEXTS[0], greedy(900, ignore_eos=True)))
            while not llm.engine.num_running:
                await asyncio.sleep(0.001)
            call = 5 if what == "step" else 0
            broken = breaking_at(call, getattr(llm.engine, what), error)
            monkeypatch.setattr(llm.engine, what, broken)
            others = asyncio.create_task(ends_of_all(served, 900))
            while what == "cancel" and llm.engine.num_running < len(TEXTS):
                await asyncio.sleep(0.001)
            leaves.cancel()
            return await others

        ends = run(all_and_one_that_leaves())
        later = [run(ends_of_all(served)) for _ in range(2)]
    assert_stopped_by(error, ends + later[0] + later[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_stream_is_told_though_none_can_be_cancelled(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")

    def broken(*_: Any) -> None:
        raise error

    with serving(llm) as served:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "cancel", broken)
            patch.setattr(llm.engine, "step", breaking_at(5, llm.engine.step, error))
            ends = run(ends_of_all(served))
            later = run(ends_of_all(served))
        for request in list(llm.engine._scheduler.running.values()):
            llm.engine.cancel(request)
    assert_stopped_by(error, ends + later)


def test_what_was_asked_for_in_the_step_that_breaks_is_told_too(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")
    stepping, go_on = threading.Event(), threading.Event()

    def broken() -> list[Update]:
        stepping.set()
        assert go_on.wait(PATIENCE)
        raise error

    monkeypatch.setattr(llm.engine, "step", broken)
    with serving(llm) as served:

        async def first_then_all() -> list[Any]:
            first = asyncio.create_task(collect(served, TEXTS[0]))
            await asyncio.to_thread(stepping.wait)
            others = asyncio.create_task(ends_of_all(served))
            while served._todo.qsize() < len(TEXTS):
                await asyncio.sleep(0.001)
            go_on.set()
            return [*await asyncio.gather(first, return_exceptions=True), *await others]

        try:
            ends = run(first_then_all())
        finally:
            go_on.set()
    assert_stopped_by(error, ends)


def test_whatever_breaks_a_submission_is_that_streams_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")
    monkeypatch.setattr(llm.engine, "submit", breaking_at(2, llm.engine.submit, error))
    with serving(llm) as served:
        ends = run(ends_of_all(served, 12))
    assert ends.pop(2) is error
    assert [len(end) for end in ends] == [12] * len(ends)


def test_a_thread_that_cannot_start_is_started_by_the_next_stream(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("can't start new thread")
    start = threading.Thread.start
    with serving(small_llm(device)) as served:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", breaking_at(0, start, error))
            with pytest.raises(RuntimeError, match="new thread"):
                run(collect(served, TEXTS[0]))
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])


# --------------------------------------------------------------------------- loops that close


@pytest.mark.parametrize("at_last", [False, True], ids=["amid tokens", "at the last token"])
def test_a_loop_that_closes_while_it_is_told_leaves_and_the_others_go_on(
    device: str, monkeypatch: pytest.MonkeyPatch, at_last: bool
) -> None:
    """It is still open when the engine's thread begins to hand over a token."""
    llm = small_llm(device)
    closed = threading.Event()
    with serving(llm) as served:
        loop = asyncio.new_event_loop()
        tell = loop.call_soon_threadsafe

        def closing_first(*arguments: Any) -> Any:
            last = arguments[1].finish_reason is not None
            if last or not at_last:
                loop.close()
                closed.set()
            return tell(*arguments)

        count = 20 if at_last else 900
        stream = served.stream(TEXTS[0], greedy(count, ignore_eos=True))
        first: Update = loop.run_until_complete(anext(stream))
        monkeypatch.setattr(loop, "call_soon_threadsafe", closing_first)
        assert closed.wait(PATIENCE)
        beside = run(collect(served, TEXTS[1]))
        assert not served._listeners
        assert not llm.engine.has_work
    assert tokens_of(beside) == expected(device, TEXTS[1])
    assert first.request.finish_reason == ("length" if at_last else "cancelled")


def test_a_loop_that_closed_before_leaves_too(device: str) -> None:
    llm = small_llm(device)
    with serving(llm) as served:
        loop = asyncio.new_event_loop()
        stream = served.stream(TEXTS[0], greedy(900, ignore_eos=True))
        first: Update = loop.run_until_complete(anext(stream))
        loop.close()
        beside = run(collect(served, TEXTS[1]))
        assert not served._listeners
    assert tokens_of(beside) == expected(device, TEXTS[1])
    assert first.request.finish_reason == "cancelled"


def test_a_stream_that_was_read_to_its_end_is_forgotten_at_once(device: str) -> None:
    """Its loop may close before it can say that it leaves."""
    with serving(small_llm(device)) as served:
        loop = asyncio.new_event_loop()
        stream = served.stream(TEXTS[0], greedy(3, ignore_eos=True))
        for _ in range(3):
            loop.run_until_complete(anext(stream))
        loop.close()
        assert not served._listeners
