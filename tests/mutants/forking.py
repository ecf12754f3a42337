"""Work in a child process that may crash."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a child process."""

    answer: str
    """Return value of the work; empty if a signal ended the process."""
    ended_by: str = ""
    """Name of the signal that ended the process; empty if it exited."""


class Child:
    """Fork of this process that does some work and returns its result."""

    def __init__(self, work: Callable[[], str], *, watch: int | None = None) -> None:
        """Start it. With ``watch``, it exits when that process is gone."""
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._reader)
            _be_the_child(work, writer, watch)
        os.close(writer)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the child has a result, or has ended."""
        return self._reader

    def ended(self) -> Ended:
        """Wait for its end; raise its error here."""
        with os.fdopen(self._reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if os.WIFSIGNALED(status):
            return Ended("", signal.Signals(os.WTERMSIG(status)).name)
        if status:
            raise RuntimeError(answer or f"a process ended with status {status} and no message")
        return Ended(answer)


def in_child(work: Callable[[], str], *, watch: int | None = None) -> Ended:
    """Do the work in a fork of this process and return its result.

    An error is raised here. With ``watch``, the child exits when that process is gone, because
    its result has no reader then.
    """
    return Child(work, watch=watch).ended()


def _be_the_child(work: Callable[[], str], writer: int, watch: int | None) -> None:
    if watch is not None:
        threading.Thread(target=_end_with, args=(watch,), daemon=True).start()
    status = 1
    try:
        answer = work()
        status = 0
    except BaseException:
        answer = traceback.format_exc()[-8000:]
    finally:
        with os.fdopen(writer, "w") as pipe:
            pipe.write(answer)
        os._exit(status)


def _end_with(process: int) -> None:
    while True:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(1)
