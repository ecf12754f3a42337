"""Steps that fail, a thread that breaks down, loops that close: nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import EngineStopped, StepFailed
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
    from roseinfer import AsyncLLM
    from roseinfer.engine.engine import Update


class Panic(BaseException):
    """A panic in Rust reaches Python like this: it is no ``Exception``."""


def breaking_at(call: int, real: Any, error: BaseException) -> Any:
    """``real``, except that one of its calls raises instead."""
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


async def end_of(served: AsyncLLM, text: str) -> Any:
    return (await asyncio.gather(collect(served, text), return_exceptions=True))[0]


def assert_failed_by(error: BaseException, ends: list[Any]) -> None:
    assert [type(end) for end in ends] == [StepFailed] * len(ends)
    assert all(end.__cause__ is error for end in ends)


def assert_stopped_by(error: BaseException, ends: list[Any]) -> None:
    assert [type(end) for end in ends] == [EngineStopped] * len(ends)
    assert all(end.__cause__ is error for end in ends)
    assert all(f"{type(error).__name__}: {error}" in str(end) for end in ends)
    assert len(set(ends)) == len(ends), "raised twice, an exception remembers both"


# ------------------------------------------------------------------------ steps that fail


@pytest.mark.parametrize("resident", [False, True])
def test_out_of_memory_once_ends_the_streams_of_that_step_only(
    device: str, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    """Two requests take part in the step, and the others wait behind them."""
    llm = small_llm(device, resident_decode=resident, max_batch_size=2, cuda_graph=False)
    error = torch.OutOfMemoryError("CUDA out of memory")
    model = llm.engine.sequence_runner.model
    monkeypatch.setattr(model, "logits", breaking_at(6, model.logits, error))
    with serving(llm) as served:
        ends = run(ends_of_all(served, 12))
        assert_failed_by(error, [ends.pop(0), ends.pop(0)])
        wanted = [expected(device, text) for text in TEXTS]
        assert [tokens_of(end) for end in ends] == wanted[2:]
        assert [tokens_of(end) for end in run(ends_of_all(served, 12))] == wanted


@pytest.mark.parametrize("together", [False, True])
def test_three_failures_in_a_row_stop_the_engine(
    device: str, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """The streams wait behind each other, or come one after the other."""
    llm = small_llm(device, max_batch_size=1)
    error = RuntimeError("the GPU fell off")

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(llm.engine._runner, "launch", broken)
    with serving(llm) as served:
        if together:
            ends = run(ends_of_all(served))
        else:
            ends = [run(end_of(served, text)) for text in TEXTS]
    assert_failed_by(error, ends[:3])
    assert_stopped_by(error, ends[3:])
    assert str(ends[3]).startswith("the engine stopped after 3 failed steps in a row: ")


def test_failures_with_a_step_between_stop_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=False, max_batch_size=1)
    error = RuntimeError("the GPU stumbled")
    calls = iter(range(1000))
    launch = llm.engine._runner.launch

    def two_of_three_broken(step: Any) -> Any:
        if next(calls) % 3:
            raise error
        return launch(step)

    with serving(llm) as served:
        monkeypatch.setattr(llm.engine._runner, "launch", two_of_three_broken)
        ends = run(ends_of_all(served))
        assert_failed_by(error, ends)
        monkeypatch.undo()
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])


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
            while served._thread._tasks.qsize() < len(TEXTS):
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
            ((_, update),) = arguments[1]
            last = update.finish_reason is not None
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
        assert not served._thread._listeners
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
        assert not served._thread._listeners
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
        assert not served._thread._listeners
