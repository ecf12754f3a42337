"""Workers of pytest-xdist, which are used without an option if it is installed."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

WORKERS = 2
"""Number of workers on a CPU: the one test that searches the engine takes as long as all others."""
GPU_WORKERS = 10
"""Number of workers on a GPU, where a search mostly waits for compilers on other cores."""


_DIE_BY_CTRL_C = "roseinfer_die_by_ctrl_c"


class Workers:
    """Plugin for ``pytest.main`` that starts workers."""

    def __init__(self, number: int) -> None:
        self.number = number

    @pytest.hookimpl(wrapper=True)  # before pytest-xdist reads its own options
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        """Start workers, unless pytest-xdist is off or has its own options."""
        # Workers must not start workers of their own.
        starts = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
        if starts and self.number > 1 and config.option.numprocesses is None:
            config.option.numprocesses = self.number
            if (
                self.number > WORKERS
            ):  # tests are few and some are long, so idle workers take tests over
                config.option.dist = "worksteal"
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_DIE_BY_CTRL_C] = True


def die_by_ctrl_c(workerinput: Mapping[str, Any]) -> None:
    """Let Ctrl-C end a worker of ``Workers`` at once and silently.

    Ctrl-C reaches all processes of a terminal; the controller reports the interruption. If the
    signal is ignored, as in background jobs, it stays ignored.
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
