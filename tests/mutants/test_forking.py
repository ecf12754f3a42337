"""Results, errors and ends of child processes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.mutants.forking import in_child


def test_child_returns_its_result() -> None:
    ended = in_child(lambda: str(os.getpid()))
    assert not ended.ended_by
    assert int(ended.answer) != os.getpid()


def test_error_in_a_child_is_raised() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: str(1 // 0))


def test_child_does_not_outlive_the_watched_process() -> None:
    ended_process = os.fork()
    if not ended_process:
        os._exit(0)
    os.waitpid(ended_process, 0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ended with status"):
        in_child(_sleep_long, watch=ended_process)
    assert time.monotonic() - start < 10


def _sleep_long() -> str:
    time.sleep(30)
    return ""


def test_signal_is_named() -> None:
    def end() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    assert in_child(end).ended_by == "SIGTERM"
