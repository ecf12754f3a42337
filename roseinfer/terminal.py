"""Terminal of a command: status lines, progress bars, and what Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


_EVERY_S = 10.0
"""Seconds between two lines about the same work, at least."""
Piece = TypeVar("Piece")


def print_status(message: str) -> None:
    """Print a line to standard error, since results go to standard output."""
    print(message, file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """Redirect standard output to nowhere: flushing the rest of it at exit would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def track_items(work: Collection[Piece], label: str, unit: str) -> Iterator[Piece]:
    """Yield each piece of the work, and show how many are done."""
    with track_progress(len(work), label, unit) as done:
        for piece in work:
            yield piece
            done()


@contextmanager
def track_progress(total: int, label: str, unit: str) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each piece of the work."""
    if not sys.stderr.isatty():
        yield _ProgressLines(total, label, unit).done
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit=unit, leave=False) as bar:
        yield bar.update


@dataclass(slots=True)
class _ProgressLines:
    """Progress in lines, at most one in ``_EVERY_S`` seconds."""

    total: int
    label: str
    unit: str
    finished: int = 0
    printed_at: float = 0.0

    def __post_init__(self) -> None:
        self._say(time.monotonic())

    def done(self) -> None:
        self.finished += 1
        now = time.monotonic()
        if now - self.printed_at >= _EVERY_S and self.finished < self.total:
            self._say(now)

    def _say(self, now: float) -> None:
        self.printed_at = now
        print_status(f"{self.label}: {self.finished} of {self.total} {self.unit}")


# Ctrl-C during the import of torch, where an exception would abort the process and dump core.


@contextmanager
def interrupts_kill() -> Iterator[None]:
    """Let Ctrl-C kill the process, unless SIGINT is ignored or has a handler of its own."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
