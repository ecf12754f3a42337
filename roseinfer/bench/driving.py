"""Drives the engine through the requests of one run, and notes when things happened.

While the clock runs, next to nothing is done for a token: a step's end and whose tokens it
brought are put on a list, and all else is worked out afterwards.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from roseinfer.bench.timing import copy_bandwidth
from roseinfer.errors import ConfigError, RoseinferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from roseinfer.engine.engine import Engine
    from roseinfer.engine.request import Request
    from roseinfer.llm import LLM, Prompt
    from roseinfer.sampling_params import SamplingParams

# What happened in a run: its steps, and when each request got its tokens.


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A call of ``Engine.step`` that brought tokens, and those before it that brought none."""

    began: float
    ended: float
    requests: list[int]
    """The number of the request that each token belongs to."""

    @property
    def passes(self) -> int:
        """The steps of the model that it stands for: most tokens that one request got in it."""
        return max(Counter(self.requests).values())

    @property
    def pass_ms(self) -> float:
        return (self.ended - self.began) / self.passes * 1e3


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request's times, in seconds."""

    arrived: float
    started: float
    """The step that first worked on it began then."""
    tokens: tuple[float, ...]
    """Each token was handed over then; those handed over together have one time."""

    @property
    def time_per_output_token(self) -> float | None:
        """The mean gap between tokens; None for a single token."""
        if len(self.tokens) == 1:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    def gaps(self, wanted: Callable[[int], bool] = lambda _: True) -> list[float]:
        """Return the gaps between tokens handed over, however many tokens come together.

        With ``wanted``, only those before tokens whose number, counted from 0, is wanted.
        """
        gaps = []
        earlier = None
        for moment, tokens in groupby(enumerate(self.tokens), key=itemgetter(1)):
            if earlier is not None and any(wanted(number) for number, _ in tokens):
                gaps.append(moment - earlier)
            earlier = moment
        return gaps

    def in_parts(self, interval: int) -> Timeline:
        """Hand over the first token at once, and those after it ``interval`` at a time."""
        last = len(self.tokens) - 1
        shown = (min(-(-at // interval) * interval, last) for at in range(last + 1))
        return Timeline(self.arrived, self.started, tuple(self.tokens[at] for at in shown))


@dataclass(frozen=True, slots=True)
class RunRecord:
    began: float
    steps: list[StepRecord]
    timelines: list[Timeline]
    prompt_lengths: list[int]
    token_ids: list[list[int]]

    def decode_steps(self) -> list[StepRecord]:
        """Return the steps that brought no request's first token."""
        begun: set[int] = set()
        found = []
        for step in self.steps:
            if begun.issuperset(step.requests):
                found.append(step)
            begun.update(step.requests)
        return found


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


# The least time that decoding can take: every byte it needs read once, at full bandwidth.


_COPY_BYTES_ON_GPU = 1 << 28
"""No more than a KV cache that takes what it can leaves free."""


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    weight_bytes: int
    """Read in every step at least, whatever the batch."""
    token_bytes: int
    """The key and the value of one token in all layers."""
    bandwidth: float

    def seconds(self, passes: int, stored_tokens: int) -> float:
        """Return the least time of forward passes that together attend to ``stored_tokens``."""
        return (passes * self.weight_bytes + stored_tokens * self.token_bytes) / self.bandwidth

    def facts(self) -> dict[str, float]:
        return {
            "copy_bandwidth_gb_per_s": self.bandwidth / 1e9,
            "weights_mb_per_step": self.weight_bytes / 1e6,
            "kv_bytes_per_token": self.token_bytes,
        }


def memory_floor(skeleton: Any, llm: LLM) -> MemoryFloor:
    """Measure the floor; ``skeleton`` is the network before an engine rearranged anything."""
    model = llm.engine.sessions.model
    values = 2 * model.shape.num_layers * model.shape.num_kv_heads * model.shape.head_dim
    return MemoryFloor(
        values_read(skeleton) * model.dtype.itemsize,
        values * model.dtype.itemsize,
        copy_bandwidth(model.device, _COPY_BYTES_ON_GPU),
    )


def values_read(network: Any) -> int:
    """Count the weights that a decode step reads at least.

    Those are all but tables of which it takes single rows, and experts that one row does not visit.
    """
    head = network.get_output_embeddings().weight
    tables = {
        id(module.weight)
        for module in network.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    read: int = sum(weight.numel() for weight in network.parameters() if id(weight) not in tables)
    return read - sum(map(_values_of_idle_experts, network.modules()))


def _values_of_idle_experts(module: Any) -> int:
    visited: int | None = getattr(getattr(module, "gate", None), "top_k", None)
    if visited is None or not hasattr(module, "experts"):
        return 0
    weights: list[Tensor] = [*module.experts.parameters()]
    return sum((len(each) - visited) * (each.numel() // len(each)) for each in weights)


# The figures of a run, and the medians of several. docs/benchmarks.md says what each one is.


Row = TypeVar("Row", bound="ThroughputRow | LatencyRow")


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """All requests of a run together."""

    run: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    total_s: float
    decode_s: float | None
    decode_step_ms: float | None
    completion_tok_per_s: float
    decode_tok_per_s: float | None
    total_tok_per_s: float
    fastest_s: float
    slowest_s: float
    times_floor: float | None

    @classmethod
    def of(cls, name: str, record: RunRecord, floor: MemoryFloor) -> ThroughputRow:
        prompt, completion = sum(record.prompt_lengths), sum(map(len, record.token_ids))
        total_s = record.steps[-1].ended - record.began
        steps = record.decode_steps()
        decode_s = sum(step.ended - step.began for step in steps)
        decoded = sum(len(step.requests) for step in steps)
        return cls(
            run=name,
            requests=len(record.timelines),
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_s=total_s,
            decode_s=decode_s or None,
            decode_step_ms=median(step.pass_ms for step in steps) if steps else None,
            completion_tok_per_s=completion / total_s,
            decode_tok_per_s=decoded / decode_s if steps else None,
            total_tok_per_s=(prompt + completion) / total_s,
            fastest_s=total_s,
            slowest_s=total_s,
            times_floor=decode_s / decode_floor_s(record, steps, floor) if steps else None,
        )


def throughput(name: str, records: Sequence[RunRecord], floor: MemoryFloor) -> ThroughputRow:
    """Return every figure's median over the runs."""
    runs = [ThroughputRow.of(name, record, floor) for record in records]
    totals = [run.total_s for run in runs]
    return replace(median_row(runs), fastest_s=min(totals), slowest_s=max(totals))


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One kind of waiting, over the requests of a run; ITL over all of their gaps."""

    run: str
    what: str
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None

    @classmethod
    def of(cls, run: str, what: str, seconds: Sequence[float]) -> LatencyRow:
        if not seconds:
            return cls(run, what)
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
        return cls(run, what, p50 * 1e3, p95 * 1e3, p99 * 1e3, fmean(seconds) * 1e3)


_WAITS: dict[str, Callable[[Timeline], Sequence[float | None]]] = {
    "TTFT": lambda seen: [seen.tokens[0] - seen.arrived],
    "TPOT": lambda seen: [seen.time_per_output_token],
    "ITL": lambda seen: seen.gaps(),
    "latency": lambda seen: [seen.tokens[-1] - seen.arrived],
    "queue wait": lambda seen: [seen.started - seen.arrived],
}


def latencies(run: str, timelines: Sequence[Timeline]) -> list[LatencyRow]:
    return [
        LatencyRow.of(run, what, [s for seen in timelines for s in waits(seen) if s is not None])
        for what, waits in _WAITS.items()
    ]


def decode_floor_s(record: RunRecord, steps: Sequence[StepRecord], floor: MemoryFloor) -> float:
    """Return the time to read the weights once a step, and once a token what is stored by then."""
    wanted = {id(step) for step in steps}
    lengths = list(record.prompt_lengths)
    stored = 0
    for step in record.steps:
        for number in step.requests:
            stored += lengths[number] if id(step) in wanted else 0
            lengths[number] += 1
    return floor.seconds(sum(step.passes for step in steps), stored)


def median_row(rows: Sequence[Row]) -> Row:
    """Take each field's median; texts, and what was never measured, are the first row's."""
    values: dict[str, Any] = {}
    for field in fields(rows[0]):
        found = [getattr(row, field.name) for row in rows]
        first = found[0]
        numbers = isinstance(first, (int, float)) and None not in found
        values[field.name] = type(first)(median(found)) if numbers else first
    return type(rows[0])(**values)
