"""The sandbox of guides: a subprocess compiles each first, since a hostile one may crash it."""

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

from roseinfer.errors import BadArgument, EngineStopped, TooBusy, error_with_type
from roseinfer.guided.grammar import (
    SerializedTokenizer,
    compile_guide,
    raise_matcher_error,
)
from roseinfer.guided.guide import Guide

_QUICK_S = 0.1
"""Seconds of processor time that are enough for most guides. Slower ones go to a second worker."""
_MAX_SLOW_TRIALS = 4
"""Most slow guides that are being tried, or waiting for it, at once."""
_MAX_CACHED_RESULTS = 256
_START_S = 120.0
"""Wall-clock seconds that a worker may take to start and read the tokenizer."""
_MAIN = """
import sys
sys.path[:] = sys.argv[1:]
from roseinfer.guided.sandbox import main
main()
"""


class Outcome(StrEnum):
    """The outcome of a trial."""

    PASSED = "passed"
    REFUSED = "refused"
    """Refused by the compiler, with a reason."""
    TIME = "time"
    MEMORY = "memory"
    CRASHED = "crashed"
    KILLED = "lost"
    """Killed or stopped for another reason: a second trial may have another outcome."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The outcome of a trial, with the reason of a refusal if the guide did not pass."""

    outcome: Outcome
    reason: str = ""
    """Message of the error; empty if the guide passed."""
    megabytes: int = 0
    """Memory of a grammar that passed, after the first tokens of a text."""


class GuideSandbox:
    """Subprocesses that try guides within limits of processor time and memory. Thread-safe.

    Each guide gets a short trial first, one guide after another, and a long one in a second worker
    if it did not finish: a slow guide delays mostly other slow ones.
    """

    def __init__(self, source: SerializedTokenizer, cpu_seconds: float, memory_mb: int) -> None:
        self._workers = [
            _SandboxWorker(source, seconds, memory_mb)
            for seconds in sorted({min(cpu_seconds, _QUICK_S), cpu_seconds})
        ]
        self._slow_trials = threading.BoundedSemaphore(_MAX_SLOW_TRIALS)
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, TrialResult] = OrderedDict()
        """Reproducible results, by a hash of the guide."""

    def validate(self, guide: Guide) -> int:
        """Return the megabytes of a guide's grammar, or raise the reason of a refusal."""
        guide_fields = {
            each.name: value
            for each in fields(guide)
            if (value := getattr(guide, each.name)) != each.default
        }
        line = json.dumps(guide_fields).encode() + b"\n"
        key = hashlib.sha256(line).digest()
        with self._lock:
            result = self._results.get(key)
        if result is None:
            result = self._try(line)
            if result.outcome is not Outcome.KILLED:
                self._remember(key, result)
        if result.outcome is not Outcome.PASSED:
            raise BadArgument(result.reason)
        return result.megabytes

    def _try(self, line: bytes) -> TrialResult:
        result = self._workers[0].run_trial(line)
        if result.outcome is Outcome.TIME and len(self._workers) > 1:
            if not self._slow_trials.acquire(blocking=False):
                raise TooBusy(
                    f"the guide is slow to compile, and {_MAX_SLOW_TRIALS} slow guides are being "
                    "compiled already; try again later"
                )
            try:
                result = self._workers[1].run_trial(line)
            finally:
                self._slow_trials.release()
        return result

    def _remember(self, key: bytes, result: TrialResult) -> None:
        with self._lock:
            self._results[key] = result
            while len(self._results) > _MAX_CACHED_RESULTS:
                self._results.popitem(last=False)


class _SandboxWorker:
    """A worker process, which tries one guide at a time."""

    def __init__(self, source: SerializedTokenizer, cpu_seconds: float, memory_mb: int) -> None:
        setup = {"cpu_seconds": cpu_seconds, "memory_mb": memory_mb}
        setup |= {each.name: getattr(source, each.name) for each in fields(source)}
        self._start = json.dumps(setup).encode() + b"\n"
        self._wall_s = 10.0 * cpu_seconds + 10.0
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._end: weakref.finalize[..., _SandboxWorker] | None = None

    def run_trial(self, line: bytes) -> TrialResult:
        """Try a guide, in a new worker if none is alive."""
        with self._lock:
            for _ in range(2):  # the worker may have been killed since it was last used
                try:
                    return self._query(self._running(), line, self._wall_s)
                except TimeoutError:
                    self._close()
                    reason = f"it did not compile within {self._wall_s:g} s of wall-clock time"
                    return TrialResult(
                        Outcome.KILLED, f"the constraint cannot be compiled: {reason}"
                    )
                except OSError:
                    self._close()
            raise EngineStopped("the process that compiles guides was killed twice")

    def _running(self) -> socket.socket:
        """Return the link to the worker; start the worker if it does not run."""
        if self._link is None:
            parent_link, child_link = socket.socketpair()
            with child_link:
                process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *sys.path],
                    stdin=child_link.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # so that its children end with it
                )
            self._link, self._end = parent_link, weakref.finalize(self, _end, process, parent_link)
            try:
                self._query(parent_link, self._start, _START_S)
            except TimeoutError:
                raise ConnectionError("the worker did not start in time") from None
        return self._link

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._link = self._end = None

    @staticmethod
    def _query(link: socket.socket, line: bytes, seconds: float) -> TrialResult:
        link.settimeout(seconds)
        link.sendall(line)
        reply = b""
        while not reply.endswith(b"\n"):
            if not (read := link.recv(1 << 16)):
                raise ConnectionError("the worker has ended")
            reply += read
        outcome, reason, megabytes = json.loads(reply)
        return TrialResult(Outcome(outcome), reason, megabytes)


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The worker process. It tries each guide in a fork of itself, which has limits and may crash.
#
# It does not import torch, and ends when its parent process does.


_USUAL_STACK = 2 << 20
"""Bytes of a thread's stack on systems with unlimited stacks."""
_STEPS = 8
"""Tokens of a text that each trial generates."""
_STEP_SHARE = 0.1
"""Fraction of the processor time that one token may take: an engine's step waits for it."""
_REFUSED = "the constraint cannot be compiled: "


def main() -> None:
    """Read the setup and then guides from the socket that is stdin, and answer each."""
    for each in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as link, link.makefile("rb") as lines:
        start = json.loads(lines.readline())
        limits = start.pop("cpu_seconds"), start.pop("memory_mb")
        tokenizer = SerializedTokenizer(**start).tokenizer()
        del start
        gc.freeze()  # the collector would write to memory that forks share
        _send_result(link, Outcome.PASSED)
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
        return  # the fork answered
    end_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if end_signal == signal.SIGPROF:
        reason = (
            f"it takes more than {cpu_seconds:g} s of processor time to compile, or a tenth of it"
        )
        _send_result(link, Outcome.TIME, f"{_REFUSED}{reason} for a token (guide_cpu_seconds)")
    elif end_signal == signal.SIGABRT:  # Rust aborts when an allocation fails
        _send_result(link, Outcome.MEMORY, _too_large(memory_mb))
    elif end_signal == signal.SIGKILL:
        _send_result(link, Outcome.KILLED, f"{_REFUSED}the process that tried it was killed")
    else:
        _send_result(link, Outcome.CRASHED, f"{_REFUSED}the compiler crashed on it")


def _try_in_thread(
    link: socket.socket, line: bytes, tokenizer: Any, cpu_seconds: float, memory_mb: int
) -> None:
    """Try a guide and end this process, with status 0 if it has answered."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # Rust prints its panics

    def attempt() -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        size, resident = _pages()
        _limit_memory(size, memory_mb)
        try:
            matcher = _try(json.loads(line), tokenizer, cpu_seconds)
        except BadArgument as error:
            _send_result(link, Outcome.REFUSED, str(error))
        except MemoryError:
            _send_result(link, Outcome.MEMORY, _too_large(memory_mb))
        except BaseException as error:  # a panic in Rust is not an Exception
            _send_result(
                link, Outcome.CRASHED, f"{_REFUSED}the compiler failed: {error_with_type(error)}"
            )
        else:
            megabytes = (_pages()[1] - resident) * resource.getpagesize() >> 20
            del matcher  # after measuring, since its memory counts
            _send_result(link, Outcome.PASSED, megabytes=max(megabytes, 0))
        os._exit(0)

    threading.stack_size(_stack())
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()


def _try(guide_fields: dict[str, Any], tokenizer: Any, cpu_seconds: float) -> Any:
    """Return the matcher of a guide, after the first tokens of a random text that it allows."""
    matcher = compile_guide(Guide(**guide_fields), tokenizer)
    rng = random.Random(0)
    for _ in range(_STEPS):
        remaining_s = min(cpu_seconds - time.process_time(), cpu_seconds * _STEP_SHARE)
        signal.setitimer(signal.ITIMER_PROF, max(remaining_s, 0.001))  # 0 would be no limit
        allowed = matcher.compute_bitmask()
        raise_matcher_error(matcher)
        bits = int.from_bytes(allowed, "little") & ~(1 << tokenizer.eos_token)
        if not bits:
            break  # the text can only end, or no token is allowed
        bits = (bits & (-1 << rng.randrange(8 * len(allowed)))) or bits
        matcher.consume_token((bits & -bits).bit_length() - 1)
    return matcher


def _stack() -> int:
    """Return half of the bytes of an engine thread's stack, so that deep guides overflow here."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    num_bytes = _USUAL_STACK if limit == resource.RLIM_INFINITY else limit
    page = resource.getpagesize()
    return num_bytes // 2 // page * page


def _pages() -> tuple[int, int]:
    """Return the pages of this process, and its resident pages that belong to no file.

    Both are 0 on systems without /proc.
    """
    try:
        size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except OSError:
        return 0, 0
    return size, resident - shared


def _limit_memory(pages: int, megabytes: int) -> None:
    if not pages:
        return
    limit = pages * resource.getpagesize() + (megabytes << 20)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _too_large(megabytes: int) -> str:
    return f"{_REFUSED}it takes more than {megabytes} MB of memory to compile (guide_memory_mb)"


def _send_result(
    link: socket.socket, outcome: Outcome, reason: str = "", megabytes: int = 0
) -> None:
    link.sendall(json.dumps([outcome, reason, megabytes]).encode() + b"\n")
