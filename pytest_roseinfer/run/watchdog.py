"""The watchdog of steps that hang, and errors that an adapter finds by itself."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.adapters.engine import RequestMix
    from pytest_roseinfer.histories.history import History

ENDED = 124
"""The exit status of a process that is ended, as that of ``timeout``."""
_GRACE = 10.0
"""Seconds between the signal and the end of the process, at most; short limits have a short one."""
_LOOKS = 4
"""How often the thread looks at least while a step may take."""
_ASLEEP = 10
"""How many times its limit of processor time a step may take that uses none."""
_SIGNAL = getattr(signal, "SIGALRM", None)


class StepHung(BaseException):
    """A step takes longer than it may. No ``except Exception`` in what is tested can stop this."""


@dataclass(slots=True)
class Watched:
    """What is tried now, by whom the process must be ended."""

    seconds: float = 0.0
    """The processor time that a step may take; 0 where nobody watches."""
    began: float | None = None
    """This process's processor time when the latest step began; None between two examples."""
    example: History | RequestMix | None = None
    saved: str = ""
    """How to run the example again."""

    def takes(self) -> float:
        """Return the processor time of the step so far, that of all threads."""
        return 0.0 if self.began is None else process_time() - self.began


WATCHED = Watched()


@contextmanager
def watched(example: History | RequestMix) -> Iterator[None]:
    """Have the watchdog know of an example while it is checked inside."""
    WATCHED.example, WATCHED.began = example, process_time()
    try:
        yield
    finally:
        WATCHED.began = WATCHED.example = None


@contextmanager
def watching(seconds: float, stderr: int = 2) -> Iterator[None]:
    """Allow each step inside so many seconds, where this platform and thread have such signals.

    Seconds are processor time; a step that uses none may take ten times as long. Last words go to
    the file descriptor ``stderr``. With 0 seconds any step may take forever.
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
        self.hangs: tuple[float | None, str] = None, ""
        """When the step began that is to be interrupted, and what is wrong with it."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def interrupt(self, number: int, frame: Any) -> None:
        began, why = self.hangs
        if began is not None and WATCHED.began == began:
            raise StepHung(why)
        if callable(self.before):  # it was another's alarm
            self.before(number, frame)

    def _watch(self) -> None:
        faulthandler.register(signal.SIGPROF, self.stderr, chain=True)
        try:
            self._look_now_and_then(min(1.0, self.seconds / _LOOKS))
        finally:
            self._without_us(0, 0)
            faulthandler.unregister(signal.SIGPROF)

    def _look_now_and_then(self, pause: float) -> None:
        began, looks, interrupted = None, 0, False
        most, asleep = self.seconds + 2 * self.grace, _ASLEEP * self.seconds
        while not self.over.wait(pause):
            self._without_us(most, asleep + 2 * self.grace)
            if WATCHED.began is None or WATCHED.began != began:
                began, looks, interrupted = WATCHED.began, 0, False
                continue
            looks += 1  # and not the time since: this thread may have been stopped, too
            took, awake = WATCHED.takes(), looks * pause
            if took > self.seconds + self.grace or awake > asleep + self.grace:
                self._end()
            if not interrupted and (took > self.seconds or awake > asleep):
                interrupted = True
                within = f"{self.seconds:g} s of processor time"
                within = within if took > self.seconds else f"{asleep:g} s, and slept"
                self.hangs = began, f"did not come back within {within}"
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _without_us(self, busy: float, asleep: float) -> None:
        """Have the process end after so much processor time if this thread does not run again.

        Native code that keeps the interpreter's lock stops it. Where that code sleeps, a traceback
        is all, since nothing tells it from a process that was stopped; 0 calls both off.
        """
        signal.setitimer(signal.ITIMER_PROF, busy)
        if asleep:
            faulthandler.dump_traceback_later(asleep, file=self.stderr)
        else:
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


# What an adapter finds wrong by itself. A failure says what its message says, and no more.


class FoundByAdapter(Exception):
    """What is tested broke a promise that its adapter holds it to."""


class StoppedAnswering(FoundByAdapter):
    """What is tested is gone, so that nothing can be tried on it any more."""

    who: ClassVar[str]
    """What is gone, as a failure calls it."""
