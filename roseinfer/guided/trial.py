"""Trials of guides in a process of their own, which a hostile one may crash or use up."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from roseinfer.errors import BadArgument, EngineStopped, TooBusy, with_kind
from roseinfer.guided.grammar import (
    TokenizerSource,
    compile_guide,
    refuse_if_too_hard,
)
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
from roseinfer.guided.trial import main
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


# The process in which guides are tried, each in a copy of it that has limits and may crash.
#
# It imports no torch, and ends when the process that started it does.


_USUAL_STACK = 2 << 20
"""Bytes of a thread's stack where processes may have stacks of any size."""
_STEPS = 8
"""Tokens of the text that a trial begins with each guide."""
_STEP_SHARE = 0.1
"""Part of the processor time that one of them may take: an engine's step waits for it."""
_REFUSED = "this form of text cannot be followed: "


def main() -> None:
    """Read a tokenizer and limits, then guides, from the link that stdin is, and answer each."""
    for each in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as link, link.makefile("rb") as lines:
        start = json.loads(lines.readline())
        limits = start.pop("cpu_seconds"), start.pop("memory_mb")
        tokenizer = TokenizerSource(**start).tokenizer()
        del start
        gc.freeze()  # the collector would write to what copies share
        _answer(link, Outcome.PASSED)
        for line in lines:
            _try_in_copy(link, line, tokenizer, *limits)


def _try_in_copy(
    link: socket.socket, line: bytes, tokenizer: Any, cpu_seconds: float, memory_mb: int
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _try_in_thread(link, line, tokenizer, cpu_seconds, memory_mb)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return  # it answered
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended == signal.SIGPROF:
        why = f"it takes more than {cpu_seconds:g} s of processor time to compile, or a tenth of it"
        _answer(link, Outcome.TIME, f"{_REFUSED}{why} for a token (guide_cpu_seconds)")
    elif ended == signal.SIGABRT:  # Rust has no other answer to an allocation that failed
        _answer(link, Outcome.MEMORY, _too_large(memory_mb))
    elif ended == signal.SIGKILL:
        _answer(link, Outcome.LOST, f"{_REFUSED}the process that tried it was killed")
    else:
        _answer(link, Outcome.CRASHED, f"{_REFUSED}the compiler crashed on it")


def _try_in_thread(
    link: socket.socket, line: bytes, tokenizer: Any, cpu_seconds: float, memory_mb: int
) -> None:
    """Try a guide and end this process, with 0 if it has answered."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # Rust tells of what ends it

    def attempt() -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        size, resident = _pages()
        _limit_memory(size, memory_mb)
        try:
            matcher = _try(json.loads(line), tokenizer, cpu_seconds)
        except BadArgument as error:
            _answer(link, Outcome.REFUSED, str(error))
        except MemoryError:
            _answer(link, Outcome.MEMORY, _too_large(memory_mb))
        except BaseException as error:  # a panic in Rust is not an Exception
            _answer(link, Outcome.CRASHED, f"{_REFUSED}the compiler broke off: {with_kind(error)}")
        else:
            megabytes = (_pages()[1] - resident) * resource.getpagesize() >> 20
            del matcher  # which counts
            _answer(link, Outcome.PASSED, megabytes=max(megabytes, 0))
        os._exit(0)

    threading.stack_size(_stack())
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()


def _try(given: dict[str, Any], tokenizer: Any, cpu_seconds: float) -> Any:
    """Return the matcher of a guide, with which a text that it allows was begun."""
    matcher = compile_guide(Guide(**given), tokenizer)
    rng = random.Random(0)
    for _ in range(_STEPS):
        left = min(cpu_seconds - time.process_time(), cpu_seconds * _STEP_SHARE)
        signal.setitimer(signal.ITIMER_PROF, max(left, 0.001))  # 0 would be no limit
        allowed = matcher.compute_bitmask()
        refuse_if_too_hard(matcher)
        bits = int.from_bytes(allowed, "little") & ~(1 << tokenizer.eos_token)
        if not bits:
            break  # the text can only end, or has no token to go on with
        bits = (bits & (-1 << rng.randrange(8 * len(allowed)))) or bits
        matcher.consume_token((bits & -bits).bit_length() - 1)
    return matcher


def _stack() -> int:
    """Return half of the bytes that an engine's threads have, so that depth is found out here."""
    most = resource.getrlimit(resource.RLIMIT_STACK)[0]
    usual = _USUAL_STACK if most == resource.RLIM_INFINITY else most
    page = resource.getpagesize()
    return usual // 2 // page * page


def _pages() -> tuple[int, int]:
    """Return the pages of this process, and those in memory that are of no file.

    Both are 0 where the system does not say.
    """
    try:
        size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0, 0
    return size, resident - shared


def _limit_memory(pages: int, megabytes: int) -> None:
    if not pages:
        return
    most = pages * resource.getpagesize() + (megabytes << 20)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _too_large(megabytes: int) -> str:
    return f"{_REFUSED}it takes more than {megabytes} MB of memory to compile (guide_memory_mb)"


def _answer(link: socket.socket, outcome: Outcome, reason: str = "", megabytes: int = 0) -> None:
    link.sendall(json.dumps([outcome, reason, megabytes]).encode() + b"\n")
