"""The watchdog of hanging steps, and errors that an adapter raises for its own findings."""

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

TIMEOUT_EXIT_STATUS = 124
"""Exit status of a process that the watchdog ends, as with ``timeout``."""
_GRACE = 10.0
"""Maximum seconds between the signal and the end of the process; fewer for short limits."""
_LOOKS = 4
"""Minimum number of checks by the thread within the limit of a step."""
_ASLEEP = 10
"""Limit of elapsed time for a step that uses no processor time, as a multiple of the limit."""
_SIGNAL = getattr(signal, "SIGALRM", None)


class StepHung(BaseException):
    """Error for a step that exceeds its limit, which no ``except Exception`` catches."""


@dataclass(slots=True)
class CurrentExample:
    """The example under test, for the message of a watchdog that ends the process."""

    seconds: float = 0.0
    """Limit of processor seconds per step; 0 without a watchdog."""
    step_began_at: float | None = None
    """This process's processor time when the latest step began; None between two examples."""
    example: History | RequestMix | None = None
    saved: str = ""
    """Instructions for running the example again."""

    def step_cpu_seconds(self) -> float:
        """Return the processor seconds of the step so far, of all threads."""
        return 0.0 if self.step_began_at is None else process_time() - self.step_began_at


CURRENT_EXAMPLE = CurrentExample()


@contextmanager
def register_example(example: History | RequestMix) -> Iterator[None]:
    """Register an example as the current one while it is checked inside."""
    CURRENT_EXAMPLE.example, CURRENT_EXAMPLE.step_began_at = example, process_time()
    try:
        yield
    finally:
        CURRENT_EXAMPLE.step_began_at = CURRENT_EXAMPLE.example = None


@contextmanager
def limit_steps(seconds: float, stderr: int = 2) -> Iterator[None]:
    """Limit the seconds of each step inside, if the platform and thread support alarm signals.

    Seconds are processor time; a step that uses none may take ten times as long. The last message
    of an ended process goes to the file descriptor ``stderr``. 0 seconds means unlimited.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not seconds or not is_main or _SIGNAL is None or CURRENT_EXAMPLE.seconds:
        yield
        return
    watchdog = _Watchdog(seconds, stderr)
    before = signal.signal(_SIGNAL, watchdog.interrupt)
    # A handler that C code installed is None here and cannot be restored.
    watchdog.before = before = signal.SIG_DFL if before is None else before
    CURRENT_EXAMPLE.seconds = seconds
    CURRENT_EXAMPLE.step_began_at = None  # the latest step without a watchdog may be over
    watchdog.thread.start()
    try:
        yield
    finally:
        CURRENT_EXAMPLE.seconds = 0.0
        watchdog.over.set()
        watchdog.thread.join()
        signal.signal(_SIGNAL, before)


class _Watchdog:
    """The thread that watches steps, and the handler of its signal in the main thread."""

    def __init__(self, seconds: float, stderr: int) -> None:
        self.seconds, self.stderr = seconds, stderr
        self.grace = min(_GRACE, max(1.0, seconds))
        self.before: Any = None
        """Previous handler of the signal."""
        self.hangs: tuple[float | None, str] = None, ""
        """Start of the step to interrupt, None if no step hangs; and its problem in words."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def interrupt(self, number: int, frame: Any) -> None:
        """Raise ``StepHung`` in the step that hangs; pass other alarms to the previous handler."""
        step_began_at, reason = self.hangs
        if step_began_at is not None and CURRENT_EXAMPLE.step_began_at == step_began_at:
            raise StepHung(reason)
        if callable(self.before):
            self.before(number, frame)

    def _watch(self) -> None:
        faulthandler.register(signal.SIGPROF, self.stderr, chain=True)
        try:
            self._look_now_and_then(min(1.0, self.seconds / _LOOKS))
        finally:
            self._without_us(0, 0)
            faulthandler.unregister(signal.SIGPROF)

    def _look_now_and_then(self, pause: float) -> None:
        step_began_at, looks, interrupted = None, 0, False
        limit, asleep = self.seconds + 2 * self.grace, _ASLEEP * self.seconds
        while not self.over.wait(pause):
            self._without_us(limit, asleep + 2 * self.grace)
            if (
                CURRENT_EXAMPLE.step_began_at is None
                or CURRENT_EXAMPLE.step_began_at != step_began_at
            ):
                step_began_at, looks, interrupted = CURRENT_EXAMPLE.step_began_at, 0, False
                continue
            looks += 1  # counted instead of elapsed time: this thread may have been stopped too
            took, awake = CURRENT_EXAMPLE.step_cpu_seconds(), looks * pause
            if took > self.seconds + self.grace or awake > asleep + self.grace:
                self._end()
            if not interrupted and (took > self.seconds or awake > asleep):
                interrupted = True
                within = f"{self.seconds:g} s of processor time"
                within = within if took > self.seconds else f"{asleep:g} s, and slept"
                self.hangs = step_began_at, f"did not return within {within}"
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _without_us(self, busy: float, asleep: float) -> None:
        """Set timers for native code that holds the GIL, which stops this thread.

        The process ends after ``busy`` processor seconds. After ``asleep`` elapsed seconds only a
        traceback is written, since sleeping code looks like a stopped process. 0 cancels both.
        """
        signal.setitimer(signal.ITIMER_PROF, busy)
        if asleep:
            faulthandler.dump_traceback_later(asleep, file=self.stderr)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        words = CURRENT_EXAMPLE.example.describe() if CURRENT_EXAMPLE.example else ""
        message = (
            f"\na step did not return within {self.seconds:g} s, nor could it be interrupted: "
            f"the process ends. The example was:\n{words}\n\n{CURRENT_EXAMPLE.saved}\n\n"
        )
        os.write(self.stderr, message.encode())
        faulthandler.dump_traceback(self.stderr)
        os._exit(TIMEOUT_EXIT_STATUS)


# Findings of adapters; a failure shows their messages alone


class AdapterFinding(Exception):
    """Error that an adapter raises for a fault that it finds itself."""


class TargetGoneError(AdapterFinding):
    """Error for a tested process or server that is gone, so that no further test is possible."""

    subject_name: ClassVar[str]
    """Name of the lost target in failure messages."""
