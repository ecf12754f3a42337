"""Drives the engine through the requests of one run, and notes when things happened.

While the clock runs, next to nothing is done for a token: a step's end and whose tokens it
brought are put on a list, and all else is worked out afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.bench.serving.record import RunRecord, StepRecord, Timeline
from roseinfer.errors import ConfigError, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roseinfer.engine.engine import Engine
    from roseinfer.engine.request import Request
    from roseinfer.llm import Prompt
    from roseinfer.sampling_params import SamplingParams

_SEED = 5


class RequestFailed(RoseinferError, RuntimeError):
    """A request ended otherwise than the benchmark can count."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how each is to be continued."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams


def random_prompts(num_requests: int, length: int, vocab_size: int) -> tuple[list[int], ...]:
    """Return the same token ids every time; hardly any two requests begin alike."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(vocab_size, (num_requests, length), generator=generator)
    return tuple(drawn.tolist())


def require_positions(engine: Engine, prompt: int, new: int, advice: str) -> None:
    """Refuse requests that the model would cut short."""
    most = engine.sessions.model.shape.max_length
    if prompt + new > most:
        raise ConfigError(
            f"a prompt of {prompt} tokens and {new} new ones are more "
            f"than the model's {most} positions: {advice}"
        )


@contextmanager
def coming(
    prompts: Sequence[Prompt], tokenizer: Any = None, workers: int = 0
) -> Iterator[list[Future[Prompt]]]:
    """Yield the prompts as they are or, with ``workers``, while so many threads tokenize them."""
    if not workers:
        there: list[Future[Prompt]] = [Future() for _ in prompts]
        for future, prompt in zip(there, prompts, strict=True):
            future.set_result(prompt)
        yield there
        return
    pool = ThreadPoolExecutor(workers, "tokenize")
    try:
        yield [pool.submit(tokenizer.encode, prompt) for prompt in prompts]
    finally:
        pool.shutdown(cancel_futures=True)


def perform(
    engine: Engine,
    work: Work,
    drive: Callable[[Run], None],
    tokenizer: Any = None,
    workers: int = 0,
) -> RunRecord:
    """Drive the engine through all requests, which share no prefixes with those of other runs."""
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
        self.engine = engine
        self.prompts = deque(prompts)
        """The prompts that are not submitted yet."""
        self.requests: list[Request] = []
        self._params = params
        self._arrived: list[float] = []
        self._started: dict[int, float] = {}
        self._not_started: list[Request] = []
        self._steps: list[StepRecord] = []
        self._fruitless_since: float | None = None
        self.began = time.perf_counter()

    def submit(self, arrived: float) -> None:
        request = self.engine.submit(self.prompts.popleft().result(), self._params)
        self.requests.append(request)
        self._not_started.append(request)
        self._arrived.append(arrived)

    def step(self) -> None:
        waiting = self.engine.num_waiting
        began = time.perf_counter()
        updates = self.engine.step()
        ended = time.perf_counter()
        if self._fruitless_since is None:
            self._fruitless_since = began
        if updates:  # if not, the device may have worked all the same, and report later
            requests = [update.request.id for update in updates]
            self._steps.append(StepRecord(self._fruitless_since, ended, requests))
            self._fruitless_since = None
        if self._not_started and self.engine.num_waiting != waiting:
            self._note_started(began)

    def drain(self) -> None:
        while self.engine.has_work:
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
        first = self.requests[0].id
        times: list[list[float]] = [[] for _ in self.requests]
        steps = [
            replace(step, requests=[number - first for number in step.requests])
            for step in self._steps
        ]
        for step in steps:
            for number in step.requests:
                times[number].append(step.ended)
        timelines = []
        for request, arrived, seen in zip(self.requests, self._arrived, times, strict=True):
            name = f"request {request.id}"
            if request.error is not None:
                raise RequestFailed(f"{name} failed: {request.error}") from request.error
            if len(seen) != request.num_generated:
                raise RequestFailed(
                    f"{name} generated {request.num_generated} tokens and handed over {len(seen)}"
                )
            timelines.append(Timeline(arrived, self._started[request.id], tuple(seen)))
        prompt_lengths = [request.prompt_length for request in self.requests]
        token_ids = [request.token_ids for request in self.requests]
        return RunRecord(self.began, steps, timelines, prompt_lengths, token_ids)
