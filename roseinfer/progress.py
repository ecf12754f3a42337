"""Says how far long work has come: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_EVERY_S = 10.0
"""Lines about the same work are at least so far apart."""
Piece = TypeVar("Piece")


def say(what: str) -> None:
    """Print a line beside the result, which is on standard output."""
    print(what, file=sys.stderr, flush=True)


def let_go_of_the_result() -> None:
    """Have all that is printed go nowhere: what is left of it would fail once more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def counted(work: Collection[Piece], what: str, unit: str) -> Iterator[Piece]:
    """Yield each piece of the work, and say how many are done."""
    with counting(len(work), what, unit) as done:
        for piece in work:
            yield piece
            done()


@contextmanager
def counting(total: int, what: str, unit: str) -> Iterator[Callable[[], object]]:
    """Yield the function that is to be called after each piece of the work."""
    if not sys.stderr.isatty():
        yield _Lines(total, what, unit).done
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, leave=False) as bar:
        yield bar.update


@dataclass(slots=True)
class _Lines:
    total: int
    what: str
    unit: str
    finished: int = 0
    said_at: float = 0.0

    def __post_init__(self) -> None:
        self._say(time.monotonic())

    def done(self) -> None:
        self.finished += 1
        now = time.monotonic()
        if now - self.said_at >= _EVERY_S and self.finished < self.total:
            self._say(now)

    def _say(self, now: float) -> None:
        self.said_at = now
        say(f"{self.what}: {self.finished} of {self.total} {self.unit}")
