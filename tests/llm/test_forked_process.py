"""Forked processes have no engine: calls there are rejected at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import AsyncLLM, EngineStopped
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
    from collections.abc import Callable

    from roseinfer import LLM

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def run_in_fork(call: Callable[[], Any]) -> str:
    """Run a call in a forked process; return the text of its result or exception."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, outcome(call).encode())
        finally:
            os._exit(0)
    os.close(writes)
    try:
        readable, _, _ = select.select([reads], [], [], PATIENCE)
        assert readable, "the forked process hangs"
        return os.read(reads, 10_000).decode()
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def assert_rejected(message: str) -> None:
    assert message.startswith(
        f"{EngineStopped.__name__}: this LLM was made in process {os.getpid()}"
    )
    assert "this process is a fork of it" in message
    assert "start processes by 'spawn'" in message


def calls_by_name(llm: LLM, open_stream: Any, served: AsyncLLM) -> dict[str, Callable[[], Any]]:
    return {
        "generate": lambda: llm.generate(TEXTS[0], greedy()),
        "stream": lambda: next(llm.stream(TEXTS[0], greedy())),
        "a stream that was open": lambda: next(open_stream),
        "a new AsyncLLM": lambda: run(collect(AsyncLLM(llm), TEXTS[0])),
        "an AsyncLLM from before": lambda: run(collect(served, TEXTS[0])),
        "its generate": lambda: run(served.generate(TEXTS[0], greedy())),
    }


def test_forked_llm_rejects_every_call(device: str) -> None:
    llm = small_llm(device)
    open_stream = llm.stream(TEXTS[0], greedy())
    tokens = [next(open_stream).token_id]
    for name, call in calls_by_name(llm, open_stream, AsyncLLM(llm)).items():
        assert_rejected(f"{run_in_fork(call)} ({name})")
    assert run_in_fork(open_stream.close) == "returned None"
    tokens += [update.token_id for update in open_stream]
    assert tokens == expected(device, TEXTS[0]), "the parent's stream is affected"


def test_forked_async_llm_rejects_instead_of_hanging(device: str) -> None:
    with serving(small_llm(device)) as served:
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])
        assert_rejected(run_in_fork(lambda: run(collect(served, TEXTS[1]))))
        assert run_in_fork(served.close) == "returned None"
        assert tokens_of(run(collect(served, TEXTS[1]))) == expected(device, TEXTS[1])


def test_forked_llm_rejects_despite_locks_held_by_other_threads(device: str) -> None:
    """The thread that holds the locks does not exist in the fork, so they stay locked."""
    llm, other = small_llm(device), small_llm(device)
    open_stream = other.stream(TEXTS[0], greedy())
    next(open_stream)
    locked, done = threading.Event(), threading.Event()

    def hold_locks() -> None:
        with llm._use_lock, other._use_lock, served._thread._starting:
            locked.set()
            assert done.wait(PATIENCE)

    with serving(llm) as served:
        run(collect(served, TEXTS[0]))
        thread = threading.Thread(target=hold_locks)
        thread.start()
        try:
            assert locked.wait(PATIENCE)
            for call in calls_by_name(llm, open_stream, served).values():
                assert_rejected(run_in_fork(call))
            assert run_in_fork(served.close) == "returned None"
            assert run_in_fork(open_stream.close) == "returned None"
        finally:
            done.set()
            thread.join()


def test_stream_is_rejected_in_a_fork_of_its_task(device: str) -> None:
    """The parent's stream continues."""
    with serving(small_llm(device)) as served:

        async def fork_between_tokens() -> tuple[str, list[int | None]]:
            stream = served.stream(TEXTS[0], greedy())
            tokens = [(await anext(stream)).token_id]

            def read_one_more() -> Any:
                """Advance the stream by hand: a fork has no event loop."""
                return stream.__anext__().send(None)

            message = run_in_fork(read_one_more)
            return message, tokens + [update.token_id async for update in stream]

        message, tokens = run(fork_between_tokens())
    assert_rejected(message)
    assert tokens == expected(device, TEXTS[0])


def test_multiprocessing_fork_worker_is_rejected(device: str) -> None:
    with serving(small_llm(device)) as served:
        run(collect(served, TEXTS[0]))
        results: Any = multiprocessing.get_context("fork").Queue()

        def work() -> None:
            results.put(outcome(lambda: asyncio.run(collect(served, TEXTS[0]))))

        worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        worker.start()
        try:
            assert_rejected(results.get(timeout=PATIENCE))
            worker.join(PATIENCE)
            assert worker.exitcode == 0
        finally:
            worker.kill()
