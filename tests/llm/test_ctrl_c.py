"""Ctrl-C in and between steps, and how interrupts are deferred."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.decode.slots import DecodeSlots
from roseinfer.engine.engine import Engine
from roseinfer.engine.scheduler import Scheduler
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.transfers import PendingReadback
from roseinfer.llm import defer_interrupts
from tests.engine.continuations import (
    TEXTS,
    during_a_stream,
    greedy,
    small_llm,
    transformers_continuation,
)
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

CALLS_WITHIN_A_STEP = [
    (Engine, "submit"),
    (Scheduler, "next_step"),
    (Scheduler, "remove"),
    (KVBlockManager, "free_blocks"),
    (DecodeSlots, "assign_slot"),
    (DecodeSlots, "release_slot"),
    (DecodeSlots, "upload"),
    (PendingReadback, "wait"),
]


def interrupt_at(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Wrap ``real`` so that SIGINT is raised when one of its calls returns."""
    calls = iter(range(10_000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return result

    return interrupted


@pytest.mark.sampled_cases
@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(
    ("owner", "name"), CALLS_WITHIN_A_STEP, ids=[name for _, name in CALLS_WITHIN_A_STEP]
)
def test_interrupted_generate_raises_and_the_next_call_is_correct(
    device: str, owner: Any, name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=True, run_ahead=2, max_batch_size=len(TEXTS))
    monkeypatch.setattr(owner, name, interrupt_at(getattr(owner, name), call))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, greedy(), progress=False)
    monkeypatch.undo()
    assert not llm.engine.has_work
    for text, output in zip(TEXTS, llm.generate(TEXTS, greedy(), progress=False), strict=True):
        assert output.token_ids == transformers_continuation(device, text, 16)
    assert_no_block_is_lost(llm)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("owner", "name"), CALLS_WITHIN_A_STEP[1:], ids=[name for _, name in CALLS_WITHIN_A_STEP[1:]]
)
def test_stream_survives_an_interrupted_call(
    device: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the running call, and not the other stream."""
    llm = small_llm(device, resident_decode=True, run_ahead=2)
    with during_a_stream(device, llm):
        monkeypatch.setattr(owner, name, interrupt_at(getattr(owner, name), 0))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS[1], greedy(), progress=False)
        monkeypatch.undo()
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize("name", ["submit", "step"])
def test_interrupted_stream_is_cancelled(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=True, run_ahead=2)
    monkeypatch.setattr(Engine, name, interrupt_at(getattr(Engine, name), 0))
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream(TEXTS[0], greedy()))
    assert not llm.engine.has_work
    assert not llm._unread_updates
    assert_no_block_is_lost(llm)


# ------------------------------------------------------------------------------ deferring


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "handler is not restored"
    signal.signal(signal.SIGINT, before)


@defer_interrupts()
def press_and_run(times: int, rest: Callable[[], object]) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    rest()


def test_deferred_interrupt_is_raised_after_the_block() -> None:
    completed_steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        press_and_run(1, lambda: completed_steps.append("the rest"))
    assert completed_steps == ["the rest"]


def test_deferred_interrupt_is_raised_after_a_failing_block() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        press_and_run(1, lambda: [][0])
    assert isinstance(caught.value.__context__, IndexError)


def test_second_interrupt_is_not_deferred() -> None:
    completed_steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        press_and_run(2, lambda: completed_steps.append("the rest"))
    assert not completed_steps


def test_custom_handler_is_called_after_the_block() -> None:
    events: list[str] = []

    def custom_handler(_: int, __: FrameType | None) -> None:
        events.append("handled")

    signal.signal(signal.SIGINT, custom_handler)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        events.append("the rest")
    assert events == ["the rest", "handled"]
    assert signal.getsignal(signal.SIGINT) is custom_handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_keep_the_handler() -> None:
    """Python allows them no handlers, and interrupts only the main thread."""
    events = []

    def work() -> None:
        with defer_interrupts():
            events.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert events == [signal.default_int_handler]
