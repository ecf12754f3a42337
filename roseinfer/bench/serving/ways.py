"""The ways to drive an engine through requests: which arrives when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.bench.serving.driving import Run


def naive(run: Run) -> None:
    """Submit each request when the one before has ended."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.drain()


def offline(run: Run) -> None:
    """Submit all requests at the beginning."""
    while run.prompts:
        run.submit(run.began)
    run.drain()


def online(run: Run) -> None:
    """Submit one request before every step."""
    while run.prompts:
        run.submit(time.perf_counter())
        run.step()
    run.drain()


def paced(interval_s: float) -> Callable[[Run], None]:
    """Return a way in which a request arrives every so often: when due, engine ready or not."""

    def drive(run: Run) -> None:
        while run.prompts:
            due = run.began + len(run.requests) * interval_s
            early = due - time.perf_counter()
            busy = run.engine.has_work
            if early <= 0 and (run.prompts[0].done() or not busy):
                run.submit(due)
            elif busy:
                run.step()
            else:
                time.sleep(early)
        run.drain()

    return drive


WAYS: dict[str, Callable[[Run], None]] = {"naive": naive, "online": online, "offline": offline}
