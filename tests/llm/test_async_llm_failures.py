"""Failing steps, a failing engine thread and closing event loops: no stream waits forever."""

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
    """Rust panic as it reaches Python: not an ``Exception``."""


def fail_at(call: int, real: Any, error: BaseException) -> Any:
    """Wrap ``real`` so that one of its calls raises instead."""
    calls = iter(range(10_000))

    def call_or_fail(*args: Any) -> Any:
        if next(calls) == call:
            raise error
        return real(*args)

    return call_or_fail


async def outcomes_of_all(served: AsyncLLM, count: int = 50) -> list[Any]:
    params = greedy(count, ignore_eos=True)
    streams = (collect(served, text, params) for text in TEXTS)
    return await asyncio.gather(*streams, return_exceptions=True)


async def outcome_of(served: AsyncLLM, text: str) -> Any:
    return (await asyncio.gather(collect(served, text), return_exceptions=True))[0]


def assert_failed_by(error: BaseException, ends: list[Any]) -> None:
    assert [type(end) for end in ends] == [StepFailed] * len(ends)
    assert all(end.__cause__ is error for end in ends)


def assert_stopped_by(error: BaseException, ends: list[Any]) -> None:
    assert [type(end) for end in ends] == [EngineStopped] * len(ends)
    assert all(end.__cause__ is error for end in ends)
    assert all(f"{type(error).__name__}: {error}" in str(end) for end in ends)
    assert len(set(ends)) == len(ends), "an exception object was raised twice"


# ------------------------------------------------------------------------ steps that fail


@pytest.mark.parametrize("resident", [False, True])
def test_out_of_memory_ends_only_the_streams_of_its_step(
    device: str, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    """Two requests take part in the step, and the others wait."""
    llm = small_llm(device, resident_decode=resident, max_batch_size=2, cuda_graph=False)
    error = torch.OutOfMemoryError("CUDA out of memory")
    model = llm.engine.sequence_runner.model
    monkeypatch.setattr(model, "logits", fail_at(6, model.logits, error))
    with serving(llm) as served:
        ends = run(outcomes_of_all(served, 12))
        assert_failed_by(error, [ends.pop(0), ends.pop(0)])
        expected_tokens = [expected(device, text) for text in TEXTS]
        assert [tokens_of(end) for end in ends] == expected_tokens[2:]
        assert [tokens_of(end) for end in run(outcomes_of_all(served, 12))] == expected_tokens


@pytest.mark.parametrize("concurrent", [False, True])
def test_three_failures_in_a_row_stop_the_engine(
    device: str, monkeypatch: pytest.MonkeyPatch, concurrent: bool
) -> None:
    """The streams are queued together, or run one after the other."""
    llm = small_llm(device, max_batch_size=1)
    error = RuntimeError("the GPU fell off")

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(llm.engine._runner, "launch", broken)
    with serving(llm) as served:
        if concurrent:
            ends = run(outcomes_of_all(served))
        else:
            ends = [run(outcome_of(served, text)) for text in TEXTS]
    assert_failed_by(error, ends[:3])
    assert_stopped_by(error, ends[3:])
    assert str(ends[3]).startswith("the engine stopped after 3 failed steps in a row: ")


def test_failures_with_a_successful_step_between_do_not_stop_the_engine(
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
        ends = run(outcomes_of_all(served))
        assert_failed_by(error, ends)
        monkeypatch.undo()
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])


# ----------------------------------------------------------------------------- the thread


@pytest.mark.parametrize("error", [Panic("unreachable"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["step", "cancel"])
def test_thread_failure_ends_every_stream_with_its_cause(
    device: str, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    llm = small_llm(device)
    with serving(llm) as served:

        async def stream_all_and_cancel_one() -> list[Any]:
            cancelled_task = asyncio.create_task(
                collect(served, TEXTS[0], greedy(900, ignore_eos=True))
            )
            while not llm.engine.num_running:
                await asyncio.sleep(0.001)
            call = 5 if method == "step" else 0
            broken = fail_at(call, getattr(llm.engine, method), error)
            monkeypatch.setattr(llm.engine, method, broken)
            others = asyncio.create_task(outcomes_of_all(served, 900))
            while method == "cancel" and llm.engine.num_running < len(TEXTS):
                await asyncio.sleep(0.001)
            cancelled_task.cancel()
            return await others

        ends = run(stream_all_and_cancel_one())
        later = [run(outcomes_of_all(served)) for _ in range(2)]
    assert_stopped_by(error, ends + later[0] + later[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_failure_ends_every_stream_even_if_cancelling_fails(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")

    def broken(*_: Any) -> None:
        raise error

    with serving(llm) as served:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "cancel", broken)
            patch.setattr(llm.engine, "step", fail_at(5, llm.engine.step, error))
            ends = run(outcomes_of_all(served))
            later = run(outcomes_of_all(served))
        for request in list(llm.engine._scheduler.running.values()):
            llm.engine.cancel(request)
    assert_stopped_by(error, ends + later)


def test_requests_submitted_during_the_failing_step_end(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")
    stepping, proceed = threading.Event(), threading.Event()

    def broken() -> list[Update]:
        stepping.set()
        assert proceed.wait(PATIENCE)
        raise error

    monkeypatch.setattr(llm.engine, "step", broken)
    with serving(llm) as served:

        async def first_then_all() -> list[Any]:
            first = asyncio.create_task(collect(served, TEXTS[0]))
            await asyncio.to_thread(stepping.wait)
            others = asyncio.create_task(outcomes_of_all(served))
            while served._thread._tasks.qsize() < len(TEXTS):
                await asyncio.sleep(0.001)
            proceed.set()
            return [*await asyncio.gather(first, return_exceptions=True), *await others]

        try:
            ends = run(first_then_all())
        finally:
            proceed.set()
    assert_stopped_by(error, ends)


def test_failing_submission_raises_only_in_its_stream(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device)
    error = Panic("unreachable")
    monkeypatch.setattr(llm.engine, "submit", fail_at(2, llm.engine.submit, error))
    with serving(llm) as served:
        ends = run(outcomes_of_all(served, 12))
    assert ends.pop(2) is error
    assert [len(end) for end in ends] == [12] * len(ends)


def test_thread_is_started_by_the_next_stream_after_a_failure(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("can't start new thread")
    start = threading.Thread.start
    with serving(small_llm(device)) as served:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail_at(0, start, error))
            with pytest.raises(RuntimeError, match="new thread"):
                run(collect(served, TEXTS[0]))
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])


# ------------------------------------------------------------------------ closing event loops


@pytest.mark.parametrize("at_last", [False, True], ids=["between tokens", "at the last token"])
def test_event_loop_closing_during_delivery_cancels_only_its_stream(
    device: str, monkeypatch: pytest.MonkeyPatch, at_last: bool
) -> None:
    """The loop is still open when the engine's thread starts to deliver a token."""
    llm = small_llm(device)
    closed = threading.Event()
    with serving(llm) as served:
        loop = asyncio.new_event_loop()
        deliver = loop.call_soon_threadsafe

        def close_and_deliver(*arguments: Any) -> Any:
            ((_, update),) = arguments[1]
            last = update.finish_reason is not None
            if last or not at_last:
                loop.close()
                closed.set()
            return deliver(*arguments)

        count = 20 if at_last else 900
        stream = served.stream(TEXTS[0], greedy(count, ignore_eos=True))
        first: Update = loop.run_until_complete(anext(stream))
        monkeypatch.setattr(loop, "call_soon_threadsafe", close_and_deliver)
        assert closed.wait(PATIENCE)
        other = run(collect(served, TEXTS[1]))
        assert not served._thread._listeners
        assert not llm.engine.has_work
    assert tokens_of(other) == expected(device, TEXTS[1])
    assert first.request.finish_reason == ("length" if at_last else "cancelled")


def test_closed_event_loop_cancels_its_stream(device: str) -> None:
    llm = small_llm(device)
    with serving(llm) as served:
        loop = asyncio.new_event_loop()
        stream = served.stream(TEXTS[0], greedy(900, ignore_eos=True))
        first: Update = loop.run_until_complete(anext(stream))
        loop.close()
        other = run(collect(served, TEXTS[1]))
        assert not served._thread._listeners
    assert tokens_of(other) == expected(device, TEXTS[1])
    assert first.request.finish_reason == "cancelled"


def test_stream_read_to_its_end_is_removed_at_once(device: str) -> None:
    """Its loop may close before it can report that it ended."""
    with serving(small_llm(device)) as served:
        loop = asyncio.new_event_loop()
        stream = served.stream(TEXTS[0], greedy(3, ignore_eos=True))
        for _ in range(3):
            loop.run_until_complete(anext(stream))
        loop.close()
        assert not served._thread._listeners
