"""Driving the engine through the requests of one run, noting when things happened.

While the clock runs, next to nothing is done for a token: a step's end and whose tokens it
brought are put on a list, and all else is worked out afterwards.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roseinfer.bench.serving.prompts import coming
from roseinfer.bench.serving.record import RunRecord, StepRecord, Timeline
from roseinfer.errors import RoseinferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from roseinfer.bench.serving.prompts import Work
    from roseinfer.config import SamplingParams
    from roseinfer.engine.engine import Engine
    from roseinfer.engine.request import Request
    from roseinfer.llm import Prompt


class RequestFailed(RoseinferError, RuntimeError):
    """A request ended otherwise than the benchmark can count."""


def perform(
    engine: Engine,
    work: Work,
    drive: Callable[[Run], None],
    tokenizer: Any = None,
    workers: int = 0,
) -> RunRecord:
    """Drive the engine through all requests. Runs share no prefixes."""
    if engine.prefixes is not None:
        engine.prefixes.clear()
    with coming(work.prompts, tokenizer, workers) as prompts:
        run = Run(engine, prompts, work.params)
        drive(run)
    return run.record()


class Run:
    """One pass over the requests."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Future[Prompt]], params: SamplingParams
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._requests: list[Request] = []
        self._arrived: list[float] = []
        self._started: dict[int, float] = {}
        self._not_started: list[Request] = []
        self._steps: list[StepRecord] = []
        self._fruitless_since: float | None = None
        self.began = time.perf_counter()

    @property
    def next(self) -> int:
        """The number of the request that is to be submitted next."""
        return len(self._requests)

    @property
    def left(self) -> bool:
        return self.next < len(self._prompts)

    @property
    def busy(self) -> bool:
        return self._engine.has_work

    def ready(self) -> bool:
        """True if the next prompt can be had without waiting."""
        return self._prompts[self.next].done()

    def submit(self, arrived: float) -> None:
        request = self._engine.submit(self._prompts[self.next].result(), self._params)
        self._requests.append(request)
        self._not_started.append(request)
        self._arrived.append(arrived)

    def step(self) -> None:
        waiting = self._engine.num_waiting
        began = time.perf_counter()
        updates = self._engine.step()
        ended = time.perf_counter()
        since = began if self._fruitless_since is None else self._fruitless_since
        if updates:
            requests = [update.request.id for update in updates]
            self._steps.append(StepRecord(since, ended, requests))
            self._fruitless_since = None
        else:  # the device may have worked all the same, and be heard of later
            self._fruitless_since = since
        if self._not_started and self._engine.num_waiting != waiting:
            self._note_started(began)

    def drain(self) -> None:
        while self._engine.has_work:
            self.step()

    def _note_started(self, began: float) -> None:
        still = []
        for request in self._not_started:
            if request.session.stored or request.finish_reason is not None:
                self._started[request.id] = began
            else:
                still.append(request)
        self._not_started = still

    def record(self) -> RunRecord:
        """Collect what happened, with requests counted from the first one of this run."""
        first = self._requests[0].id
        steps = [
            replace(step, requests=[number - first for number in step.requests])
            for step in self._steps
        ]
        times: list[list[float]] = [[] for _ in self._requests]
        for step in steps:
            for number in step.requests:
                times[number].append(step.ended)
        for request, seen in zip(self._requests, times, strict=True):
            _check(request, len(seen))
        return RunRecord(
            self.began,
            steps,
            [
                Timeline(arrived, self._started[request.id], tuple(seen))
                for arrived, request, seen in zip(self._arrived, self._requests, times, strict=True)
            ],
            [request.prompt_length for request in self._requests],
            [request.token_ids for request in self._requests],
        )


def _check(request: Request, seen: int) -> None:
    if request.error is not None:
        raise RequestFailed(f"request {request.id} failed: {request.error}") from request.error
    if seen != request.num_generated:
        raise RequestFailed(
            f"request {request.id} generated {request.num_generated} tokens and handed over {seen}"
        )


# ------------------------------------------------------------------------- ways to drive it


def naive(run: Run) -> None:
    """One request after the other; each arrives when the one before has ended."""
    while run.left:
        run.submit(time.perf_counter())
        run.drain()


def offline(run: Run) -> None:
    """All requests are there at the beginning."""
    while run.left:
        run.submit(run.began)
    run.drain()


def online(run: Run) -> None:
    """One request more before every step."""
    while run.left:
        run.submit(time.perf_counter())
        run.step()
    run.drain()


def paced(interval_s: float) -> Callable[[Run], None]:
    """A request every so often. It arrives when it is due, ready for it or not."""

    def drive(run: Run) -> None:
        while run.left:
            due = run.began + run.next * interval_s
            early = due - time.perf_counter()
            if early <= 0 and (run.ready() or not run.busy):
                run.submit(due)
            elif run.busy:
                run.step()
            else:
                time.sleep(early)
        run.drain()

    return drive


WAYS: dict[str, Callable[[Run], None]] = {"naive": naive, "online": online, "offline": offline}
