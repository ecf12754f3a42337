"""Pairs of workers start at the same time, each on CPUs of its own.

Starting takes most of a comparison: a process that imports torch takes seconds to be ready, and its
series a tenth of one. All that were started are ready before one is measured, and wait for their
turn without doing anything, so they take nothing from it.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.gates.time.worker_process import Worker

    Pair = tuple[Worker, Worker]

MOST_PAIRS = 2
"""Each has two models in memory."""


@contextmanager
def started_ahead(start: Callable[[int], Pair], pairs: int) -> Iterator[Callable[[int], Pair]]:
    """Yield what hands out the pairs of ``start`` by their numbers, and starts so many at a time.

    Those that nobody has taken in the end are stopped.
    """
    waiting: deque[Pair] = deque()

    def take(number: int) -> Pair:
        if not waiting:
            for ahead in range(pairs):
                waiting.append(start(number + ahead))
            for there, here in waiting:
                _ = here.ready, there.ready  # what neither side has is misspelt, and not new
        return waiting.popleft()

    try:
        yield take
    finally:
        for worker in (worker for pair in waiting for worker in pair):
            worker.stop()
