"""The process in which guides are tried, each in a copy of it that has limits and may crash.

It imports no torch, and ends when the process that started it does.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from roseinfer.errors import BadArgument, with_kind
from roseinfer.guided.grammars import TokenizerSource, compile_guide, refuse_if_too_hard
from roseinfer.guided.guide import Guide
from roseinfer.guided.guide_trial import Outcome

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
