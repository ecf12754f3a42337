"""Has pytest-xdist share the tests out among processes, without an option of its own."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

WORKERS = 2
"""The search for one engine takes as long as all the others together, and is one test."""
GPU_WORKERS = 10
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
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_DIE_BY_CTRL_C] = True


def die_by_ctrl_c(workerinput: Mapping[str, Any]) -> None:
    """Have a worker of ``Workers`` end by Ctrl-C at once, whatever it is doing, and without a word.

    It reaches all processes at a terminal; the one that started the worker says what happened.
    Where it is ignored, as by what runs in the background, it stays so.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and _DIE_BY_CTRL_C in workerinput and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def workers_for(*, gpu: bool) -> int:
    return min(GPU_WORKERS if gpu else WORKERS, usable_cores())


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
