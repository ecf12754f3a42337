"""Guides are tried in another process, which a hostile one may crash or use up."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, EngineStopped, TooBusy

if TYPE_CHECKING:
    from roseinfer.guided.grammars import TokenizerSource
    from roseinfer.guided.guide import Guide

_QUICK_S = 0.1
"""Processor time in which most guides pass. Those that need more wait for each other elsewhere."""
_MOST_SLOW = 4
"""Guides that may be tried for longer, or wait for it, at once."""
_MOST_REMEMBERED = 256
_START_S = 120.0
"""Time by the clock in which a worker must have imported what it needs and read the tokenizer."""
_MAIN = """
import sys
sys.path[:] = sys.argv[1:]
from roseinfer.guided.trial_worker import main
main()
"""


class Outcome(StrEnum):
    """How a trial ended."""

    PASSED = "passed"
    REFUSED = "refused"
    """The compiler said why."""
    TIME = "time"
    MEMORY = "memory"
    CRASHED = "crashed"
    LOST = "lost"
    """It was killed or stopped by something else, so another trial may end otherwise."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a trial, with the reason against the guide if it did not pass."""

    outcome: Outcome
    reason: str = ""
    megabytes: int = 0
    """Memory of a grammar that passed, when a text has begun."""


class GuideTrial:
    """Tries guides within limits of processor time and memory. Any thread may ask.

    All guides have a short trial first, one after the other, and those that did not end a long
    one, in another worker: a guide that takes long delays few but its like.
    """

    def __init__(self, source: TokenizerSource, cpu_seconds: float, memory_mb: int) -> None:
        self._lanes = [
            _Lane(source, seconds, memory_mb)
            for seconds in sorted({min(cpu_seconds, _QUICK_S), cpu_seconds})
        ]
        self._slow_places = threading.BoundedSemaphore(_MOST_SLOW)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        """By a hash of the guide, those that will not change."""

    def require(self, guide: Guide) -> int:
        """Return the megabytes of a guide's grammar, or raise the reason against it."""
        given = {
            each.name: value
            for each in fields(guide)
            if (value := getattr(guide, each.name)) != each.default
        }
        line = json.dumps(given).encode() + b"\n"
        name = hashlib.sha256(line).digest()
        with self._lock:
            verdict = self._verdicts.get(name)
        if verdict is None:
            verdict = self._try(line)
            if verdict.outcome is not Outcome.LOST:
                self._remember(name, verdict)
        if verdict.outcome is not Outcome.PASSED:
            raise BadArgument(verdict.reason)
        return verdict.megabytes

    def _try(self, line: bytes) -> Verdict:
        verdict = self._lanes[0].verdict(line)
        if verdict.outcome is Outcome.TIME and len(self._lanes) > 1:
            if not self._slow_places.acquire(blocking=False):
                raise TooBusy(
                    f"this form of text takes long to compile, and {_MOST_SLOW} of that kind are "
                    "being tried: try again later"
                )
            try:
                verdict = self._lanes[1].verdict(line)
            finally:
                self._slow_places.release()
        return verdict

    def _remember(self, name: bytes, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts[name] = verdict
            while len(self._verdicts) > _MOST_REMEMBERED:
                self._verdicts.popitem(last=False)


class _Lane:
    """One worker process, which tries one guide at a time."""

    def __init__(self, source: TokenizerSource, cpu_seconds: float, memory_mb: int) -> None:
        given = {"cpu_seconds": cpu_seconds, "memory_mb": memory_mb}
        given |= {each.name: getattr(source, each.name) for each in fields(source)}
        self._start = json.dumps(given).encode() + b"\n"
        self._wall_s = 10.0 * cpu_seconds + 10.0
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._end: weakref.finalize[..., _Lane] | None = None

    def verdict(self, line: bytes) -> Verdict:
        """Try a guide, in a new worker if there is none that lives."""
        with self._lock:
            for _ in range(2):  # the worker may have been killed since it was last used
                try:
                    return self._ask(self._running(), line, self._wall_s)
                except TimeoutError:
                    self._close()
                    why = f"it did not compile within {self._wall_s:g} s by the clock"
                    return Verdict(Outcome.LOST, f"this form of text cannot be followed: {why}")
                except OSError:
                    self._close()
            raise EngineStopped("the process that tries forms of text was killed, and again")

    def _running(self) -> socket.socket:
        """Return the link to the worker, which starts unless it has."""
        if self._link is None:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *sys.path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # so that its own processes end with it
                )
            self._link, self._end = ours, weakref.finalize(self, _end, process, ours)
            try:
                self._ask(ours, self._start, _START_S)
            except TimeoutError:
                raise ConnectionError("it did not start in time") from None
        return self._link

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._link = self._end = None

    @staticmethod
    def _ask(link: socket.socket, line: bytes, seconds: float) -> Verdict:
        link.settimeout(seconds)
        link.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            if not (read := link.recv(1 << 16)):
                raise ConnectionError("the worker has ended")
            answer += read
        outcome, reason, megabytes = json.loads(answer)
        return Verdict(Outcome(outcome), reason, megabytes)


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
