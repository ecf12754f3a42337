"""A child process returns what it made, and its end is told."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.mutants.forking import in_child


def test_a_child_returns_what_it_made() -> None:
    ended = in_child(lambda: str(os.getpid()))
    assert not ended.ended_by
    assert int(ended.answer) != os.getpid()


def test_an_error_in_a_child_is_raised() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: str(1 // 0))


def test_a_child_does_not_outlive_whom_it_works_for() -> None:
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ended with status"):
        in_child(_sleep_long, watch=gone)
    assert time.monotonic() - start < 10


def _sleep_long() -> str:
    time.sleep(30)
    return ""


def test_a_signal_is_told_by_name() -> None:
    def end() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    assert in_child(end).ended_by == "SIGTERM"
