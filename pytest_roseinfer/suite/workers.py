"""Has pytest-xdist share the tests out among processes, without an option of its own."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from types import FrameType

WORKERS = 2
"""The search for one engine takes as long as all the others together, and is one test."""
GPU_WORKERS = 8
"""On a GPU a search mostly waits for compilers, which other cores are free to run meanwhile."""


_DIE_BY_CTRL_C = "roseinfer_die_by_ctrl_c"


class Workers:
    """A plugin for ``pytest.main``."""

    def __init__(self, number: int) -> None:
        self.number = number

    @pytest.hookimpl(wrapper=True)  # before pytest-xdist reads its own options
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Ask for the workers, unless pytest-xdist was turned off or told otherwise."""
        # A worker that had workers of its own would soon be followed by thousands.
        starts = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
        if starts and self.number > 1 and config.option.numprocesses is None:
            config.option.numprocesses = self.number
            if self.number > WORKERS:  # tests are few, and some take long: none waits behind one
                config.option.dist = "worksteal"
        with _noting_ctrl_c() as pressed:
            status = yield
        # A worker that has died may be reported first, as a test that failed.
        return pytest.ExitCode.INTERRUPTED if pressed else status

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_DIE_BY_CTRL_C] = True


@contextmanager
def _noting_ctrl_c() -> Iterator[list[int]]:
    """Yield a list that is empty until Ctrl-C, which does what it did."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    does = before

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        does(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def die_by_ctrl_c(workerinput: Mapping[str, Any]) -> None:
    """Have a worker of ``Workers`` end by Ctrl-C at once, whatever it is doing, and without a word.

    It reaches all processes at a terminal; the one that started the worker says what happened.
    """
    if _DIE_BY_CTRL_C in workerinput and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def workers_for(*, gpu: bool) -> int:
    return min(GPU_WORKERS if gpu else WORKERS, usable_cores())


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
