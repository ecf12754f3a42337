"""Running something in a child process that may crash."""

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
    """How a child ended."""

    answer: str
    """What it returned."""
    ended_by: str = ""
    """The signal that ended it; empty when it ended by itself."""


class Child:
    """A fork of this process that does some work and says what came of it."""

    def __init__(self, work: Callable[[], str], *, watch: int | None = None) -> None:
        """Start it. With ``watch``, it ends itself when that process is gone."""
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._reader)
            _be_the_child(work, writer, watch)
        os.close(writer)

    def fileno(self) -> int:
        """Return what becomes readable when the child has something to say, or has ended."""
        return self._reader

    def ended(self) -> Ended:
        """Wait for its end. An error there is raised here."""
        with os.fdopen(self._reader) as pipe:
            said = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if os.WIFSIGNALED(status):
            return Ended("", signal.Signals(os.WTERMSIG(status)).name)
        if status:
            raise RuntimeError(said or f"a process ended with status {status} and said nothing")
        return Ended(said)


def in_child(work: Callable[[], str], *, watch: int | None = None) -> Ended:
    """Do the work in a fork of this process and return what it returns.

    An error there is raised here. With ``watch``, the child ends itself when that process
    is gone, for then nobody waits for its answer any more.
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
