"""A watchdog: it ends a step of a cache or an engine that does not come back.

Whoever drives one notes when its latest step began, which costs an assignment. A thread looks at
that now and then. To a step that takes too long it sends a signal, which raises an error inside
it. Where no signal gets through, because native code hangs or what is tested catches everything,
the thread says what was tried and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.adapters.mix import RequestMix
    from pytest_roseinfer.cases.history import History

ENDED = 124
"""The exit status of a process that is ended, as that of ``timeout``."""
_GRACE = 10.0
"""Seconds between the signal and the end of the process, at most; short limits have a short one."""
_LOOKS = 4
"""How often the thread looks at least while a step may take."""
_SIGNAL = getattr(signal, "SIGALRM", None)


class StepHung(BaseException):
    """A step takes longer than it may. No ``except Exception`` in what is tested can stop this."""


@dataclass(slots=True)
class Watched:
    """What is tried now, by whom the process must be ended."""

    seconds: float = 0.0
    """The time that a step may take; 0 where nobody watches."""
    began: float | None = None
    """When the latest step began; None between two examples."""
    example: History | RequestMix | None = None
    saved: str = ""
    """How to run the example again."""

    def waits(self) -> float:
        return 0.0 if self.began is None else monotonic() - self.began


WATCHED = Watched()


@contextmanager
def watching(seconds: float, stderr: int = 2) -> Iterator[None]:
    """Allow each step inside so many seconds, where this platform and thread have such signals.

    Last words go to the file descriptor ``stderr``. With 0 seconds any step may take forever.
    """
    here = threading.current_thread() is threading.main_thread()
    if not seconds or not here or _SIGNAL is None or WATCHED.seconds:
        yield
        return
    watchdog = _Watchdog(seconds, stderr)
    before = signal.signal(_SIGNAL, watchdog.interrupt)
    # One that C code installed cannot be put back.
    watchdog.before = before = signal.SIG_DFL if before is None else before
    WATCHED.seconds = seconds
    WATCHED.began = None  # a step from before, when nobody watched, may be long over
    watchdog.thread.start()
    try:
        yield
    finally:
        WATCHED.seconds = 0.0
        watchdog.over.set()
        watchdog.thread.join()
        signal.signal(_SIGNAL, before)


class _Watchdog:
    """The thread, and what its signal does in the main one."""

    def __init__(self, seconds: float, stderr: int) -> None:
        self.seconds, self.stderr = seconds, stderr
        self.grace = min(_GRACE, max(1.0, seconds))
        self.before: Any = None
        """What handled the signal."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def interrupt(self, number: int, frame: Any) -> None:
        if WATCHED.waits() > self.seconds:
            raise StepHung(f"did not come back within {self.seconds:g} s")
        if callable(self.before):  # it was another's alarm
            self.before(number, frame)

    def _watch(self) -> None:
        interrupted = None
        most = self.seconds + 2 * self.grace
        while not self.over.wait(min(1.0, self.seconds / _LOOKS)):
            # Native code that keeps the interpreter's lock stops this thread too, but not this.
            faulthandler.dump_traceback_later(most, exit=True, file=self.stderr)
            began, waits = WATCHED.began, WATCHED.waits()
            if waits > self.seconds + self.grace:
                self._end()
            if waits > self.seconds and began != interrupted:
                interrupted = began
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        words = WATCHED.example.words() if WATCHED.example else ""
        said = (
            f"\na step did not come back within {self.seconds:g} s, nor could it be interrupted: "
            f"the process ends. What was tried:\n{words}\n\n{WATCHED.saved}\n\n"
        )
        os.write(self.stderr, said.encode())
        faulthandler.dump_traceback(self.stderr)
        os._exit(ENDED)
