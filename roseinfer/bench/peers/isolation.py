"""A call in a process of its own; whatever that process started ends with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


def in_process(work: Callable[..., Any], *arguments: Any, time_limit_s: float) -> Any:
    """Return what ``work`` returns, or a text that says why it does not."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_answer, args=(theirs, folder, work, arguments))
        process.start()
        theirs.close()  # so that its end is seen here
        try:
            if not ours.poll(time_limit_s):
                return f"it took longer than {time_limit_s:g} s"
            return ours.recv()
        except EOFError:
            process.join()
            return f"exit status {process.exitcode}, and it said nothing"
        finally:
            assert process.pid
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _answer(to: Connection, folder: str, work: Callable[..., Any], arguments: Any) -> None:
    os.setpgid(0, 0)
    tempfile.tempdir = folder  # which is removed, however this process ends
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    try:
        to.send(work(*arguments))
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}")
