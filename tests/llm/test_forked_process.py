"""A process that was forked has no engine: whoever asks there for tokens is told so at once."""

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
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_a_fork(call: Callable[[], Any]) -> str:
    """Call it in a forked process; return what it returned or raised there, in words."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, outcome(call).encode())
        finally:
            os._exit(0)
    os.close(writes)
    try:
        answered, _, _ = select.select([reads], [], [], PATIENCE)
        assert answered, "it hangs"
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


def assert_refused(said: str) -> None:
    assert said.startswith(f"{EngineStopped.__name__}: this LLM was made in process {os.getpid()}")
    assert "this process is a fork of it" in said
    assert "start processes by 'spawn'" in said


def ways_to_ask(llm: LLM, begun: Any, served: AsyncLLM) -> dict[str, Callable[[], Any]]:
    return {
        "generate": lambda: llm.generate(TEXTS[0], greedy()),
        "stream": lambda: next(llm.stream(TEXTS[0], greedy())),
        "a stream that was open": lambda: next(begun),
        "a new AsyncLLM": lambda: run(collect(AsyncLLM(llm), TEXTS[0])),
        "an AsyncLLM from before": lambda: run(collect(served, TEXTS[0])),
        "its generate": lambda: run(served.generate(TEXTS[0], greedy())),
    }


def test_whatever_is_asked_of_a_forked_llm_is_refused(device: str) -> None:
    llm = small_llm(device)
    begun = llm.stream(TEXTS[0], greedy())
    tokens = [next(begun).token_id]
    for way, call in ways_to_ask(llm, begun, AsyncLLM(llm)).items():
        assert_refused(f"{in_a_fork(call)} ({way})")
    assert in_a_fork(begun.close) == "returned None"
    tokens += [update.token_id for update in begun]
    assert tokens == expected(device, TEXTS[0]), "this process is as it was"


def test_a_forked_async_llm_that_has_served_hangs_for_nobody(device: str) -> None:
    with serving(small_llm(device)) as served:
        assert tokens_of(run(collect(served, TEXTS[0]))) == expected(device, TEXTS[0])
        assert_refused(in_a_fork(lambda: run(collect(served, TEXTS[1]))))
        assert in_a_fork(served.close) == "returned None"
        assert tokens_of(run(collect(served, TEXTS[1]))) == expected(device, TEXTS[1])


def test_locks_that_were_held_elsewhere_do_not_matter(device: str) -> None:
    """Nobody lets go of them in the fork: the thread that holds one is not there."""
    llm, other = small_llm(device), small_llm(device)
    begun = other.stream(TEXTS[0], greedy())
    next(begun)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with llm._use_lock, other._use_lock, served._thread._starting:
            held.set()
            assert done.wait(PATIENCE)

    with serving(llm) as served:
        run(collect(served, TEXTS[0]))
        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert held.wait(PATIENCE)
            for call in ways_to_ask(llm, begun, served).values():
                assert_refused(in_a_fork(call))
            assert in_a_fork(served.close) == "returned None"
            assert in_a_fork(begun.close) == "returned None"
        finally:
            done.set()
            thread.join()


def test_a_task_that_forks_gets_no_more_tokens_there(device: str) -> None:
    """In this process its stream goes on."""
    with serving(small_llm(device)) as served:

        async def fork_between_tokens() -> tuple[str, list[int | None]]:
            stream = served.stream(TEXTS[0], greedy())
            tokens = [(await anext(stream)).token_id]

            def one_more() -> Any:
                """Drive the stream by hand: a fork has no event loop."""
                return stream.__anext__().send(None)

            said = in_a_fork(one_more)
            return said, tokens + [update.token_id async for update in stream]

        said, tokens = run(fork_between_tokens())
    assert_refused(said)
    assert tokens == expected(device, TEXTS[0])


def test_workers_of_multiprocessing_are_told_too(device: str) -> None:
    with serving(small_llm(device)) as served:
        run(collect(served, TEXTS[0]))
        answers: Any = multiprocessing.get_context("fork").Queue()

        def work() -> None:
            answers.put(outcome(lambda: asyncio.run(collect(served, TEXTS[0]))))

        worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        worker.start()
        try:
            assert_refused(answers.get(timeout=PATIENCE))
            worker.join(PATIENCE)
            assert worker.exitcode == 0
        finally:
            worker.kill()
