"""Ctrl-C between steps, wherever in one it comes; and what is done with it meanwhile."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.decode.readback import PendingReadback
from roseinfer.decode.slots import DecodeSlots
from roseinfer.engine.engine import Engine
from roseinfer.engine.scheduler import Scheduler
from roseinfer.kv.manager import KVBlockManager
from roseinfer.llm import defer_interrupts
from tests.engine.continuations import TEXTS, beside_a_stream, by_transformers, greedy, small_llm
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

AMID = [
    (Engine, "submit"),
    (Scheduler, "next_step"),
    (Scheduler, "remove"),
    (KVBlockManager, "free_blocks"),
    (DecodeSlots, "assign_slot"),
    (DecodeSlots, "release_slot"),
    (DecodeSlots, "upload"),
    (PendingReadback, "wait"),
]


def with_ctrl_c(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    """``real``, except that Ctrl-C is pressed as one of its calls returns."""
    calls = iter(range(10_000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return result

    return interrupted


@pytest.mark.many_alike
@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize(("owner", "name"), AMID, ids=[name for _, name in AMID])
def test_a_call_ends_by_it_and_the_next_is_right(
    device: str, owner: Any, name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=True, run_ahead=2, max_batch_size=len(TEXTS))
    monkeypatch.setattr(owner, name, with_ctrl_c(getattr(owner, name), call))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, greedy(), progress=False)
    monkeypatch.undo()
    assert not llm.engine.has_work
    for text, output in zip(TEXTS, llm.generate(TEXTS, greedy(), progress=False), strict=True):
        assert output.token_ids == by_transformers(device, text, 16)
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize(("owner", "name"), AMID[1:], ids=[name for _, name in AMID[1:]])
def test_a_stream_outlives_it(
    device: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the call that is being carried out, and not the stream beside it."""
    llm = small_llm(device, resident_decode=True, run_ahead=2)
    with beside_a_stream(device, llm):
        monkeypatch.setattr(owner, name, with_ctrl_c(getattr(owner, name), 0))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS[1], greedy(), progress=False)
        monkeypatch.undo()
    assert_no_block_is_lost(llm)


@pytest.mark.parametrize("name", ["submit", "step"])
def test_a_stream_that_ends_by_it_is_forgotten(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = small_llm(device, resident_decode=True, run_ahead=2)
    monkeypatch.setattr(Engine, name, with_ctrl_c(getattr(Engine, name), 0))
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream(TEXTS[0], greedy()))
    assert not llm.engine.has_work
    assert not llm._unread_updates
    assert_no_block_is_lost(llm)


# ------------------------------------------------------------------------------ by itself


@pytest.fixture(autouse=True)
def as_python_has_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "not put back"
    signal.signal(signal.SIGINT, before)


@defer_interrupts()
def pressed(times: int, then: Callable[[], object]) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    then()


def test_it_waits_for_the_end() -> None:
    completed_steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pressed(1, lambda: completed_steps.append("the rest"))
    assert completed_steps == ["the rest"]


def test_it_is_felt_where_the_block_failed_too() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        pressed(1, lambda: [][0])
    assert isinstance(caught.value.__context__, IndexError)


def test_a_second_one_does_not_wait() -> None:
    completed_steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pressed(2, lambda: completed_steps.append("the rest"))
    assert not completed_steps


def test_whoever_handles_it_otherwise_is_told_afterwards() -> None:
    seen: list[str] = []

    def own(_: int, __: FrameType | None) -> None:
        seen.append("told")

    signal.signal(signal.SIGINT, own)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        seen.append("the rest")
    assert seen == ["the rest", "told"]
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_left_alone() -> None:
    """Python allows them no handlers, and interrupts only the main one."""
    seen = []

    def work() -> None:
        with defer_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
