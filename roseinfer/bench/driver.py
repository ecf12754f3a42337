"""Driver of the engine: runs a workload, and records the times of steps and tokens.

To keep the overhead per token low while the clock runs, only the end of each step and the requests
of its tokens are recorded; everything else is computed afterwards.
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

# Records of a run: its steps, and the times of each request's tokens.


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Call of ``Engine.step`` that returned tokens, and the calls before it that did not."""

    started_at: float
    ended_at: float
    requests: list[int]
    """Request number of each token."""

    @property
    def passes(self) -> int:
        """Forward passes that it covers: the most tokens that one request got in it."""
        return max(Counter(self.requests).values())

    @property
    def pass_ms(self) -> float:
        return (self.ended_at - self.started_at) / self.passes * 1e3


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of one request, in seconds."""

    arrived: float
    started: float
    """Start of the first step with some of its tokens."""
    tokens: tuple[float, ...]
    """Delivery times of its tokens; tokens delivered together have the same time."""

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens; None for a single token."""
        if len(self.tokens) == 1:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    def gaps(self, selects: Callable[[int], bool] = lambda _: True) -> list[float]:
        """Return the gaps between deliveries, each of one or more tokens.

        With ``selects``, return only gaps before deliveries with a token whose number, from 0, is
        wanted.
        """
        gaps = []
        previous = None
        for moment, tokens in groupby(enumerate(self.tokens), key=itemgetter(1)):
            if previous is not None and any(selects(number) for number, _ in tokens):
                gaps.append(moment - previous)
            previous = moment
        return gaps

    def batch_tokens(self, interval: int) -> Timeline:
        """Return the times if all tokens but the first are delivered ``interval`` at a time."""
        last = len(self.tokens) - 1
        delivered_with = (min(-(-at // interval) * interval, last) for at in range(last + 1))
        return Timeline(self.arrived, self.started, tuple(self.tokens[at] for at in delivered_with))


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Steps, request times and tokens of one run."""

    started_at: float
    steps: list[StepRecord]
    timelines: list[Timeline]
    prompt_lengths: list[int]
    token_ids: list[list[int]]

    def decode_steps(self) -> list[StepRecord]:
        """Return the steps without a first token of any request."""
        started: set[int] = set()
        steps = []
        for step in self.steps:
            if started.issuperset(step.requests):
                steps.append(step)
            started.update(step.requests)
        return steps


_SEED = 5


class RequestFailed(RoseinferError, RuntimeError):
    """Error of a request that failed, or whose tokens do not add up."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the sampling parameters of all of them."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams


def random_prompts(num_requests: int, length: int, vocab_size: int) -> tuple[list[int], ...]:
    """Draw prompts of random tokens, the same in every call, with hardly any common prefixes."""
    generator = torch.Generator().manual_seed(_SEED)
    prompts = torch.randint(vocab_size, (num_requests, length), generator=generator)
    return tuple(prompts.tolist())


def require_positions(engine: Engine, prompt: int, new: int, advice: str) -> None:
    """Raise if a prompt and its new tokens exceed the model's positions."""
    max_length = engine.sequence_runner.model.shape.max_length
    if prompt + new > max_length:
        raise ConfigError(
            f"prompt of {prompt} tokens and {new} new ones: the model has only {max_length} "
            f"positions; {advice}"
        )


@contextmanager
def tokenized_prompts(
    prompts: Sequence[Prompt], tokenizer: Any = None, workers: int = 0
) -> Iterator[list[Future[Prompt]]]:
    """Yield futures of prompts, tokenized by ``workers`` threads, or as they are if 0."""
    if not workers:
        futures: list[Future[Prompt]] = [Future() for _ in prompts]
        for future, prompt in zip(futures, prompts, strict=True):
            future.set_result(prompt)
        yield futures
        return
    pool = ThreadPoolExecutor(workers, "tokenize")
    try:
        yield [pool.submit(tokenizer.encode, prompt) for prompt in prompts]
    finally:
        pool.shutdown(cancel_futures=True)


def run_workload(
    engine: Engine,
    work: Workload,
    drive: Callable[[Run], None],
    tokenizer: Any = None,
    workers: int = 0,
) -> RunRecord:
    """Run all requests by ``drive``, with an empty prefix cache, so that runs share no prefixes."""
    if engine.prefixes is not None:
        engine.prefixes.clear()
    with tokenized_prompts(work.prompts, tokenizer, workers) as prompts:
        run = Run(engine, prompts, work.params)
        drive(run)
    return run.record()


class Run:
    """Single run over all requests."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Future[Prompt]], params: SamplingParams
    ) -> None:
        self.engine = engine
        self.prompts = deque(prompts)
        """Prompts that are not submitted yet."""
        self.requests: list[Request] = []
        self._params = params
        self._arrived: list[float] = []
        self._started: dict[int, float] = {}
        self._not_started: list[Request] = []
        self._steps: list[StepRecord] = []
        self._no_update_since: float | None = None
        self.started_at = time.perf_counter()

    def submit(self, arrived: float) -> None:
        request = self.engine.submit(self.prompts.popleft().result(), self._params)
        self.requests.append(request)
        self._not_started.append(request)
        self._arrived.append(arrived)

    def step(self) -> None:
        waiting = self.engine.num_waiting
        started_at = time.perf_counter()
        updates = self.engine.step()
        ended_at = time.perf_counter()
        if self._no_update_since is None:
            self._no_update_since = started_at
        if updates:  # else the device may still have worked, with tokens in a later step
            requests = [update.request.id for update in updates]
            self._steps.append(StepRecord(self._no_update_since, ended_at, requests))
            self._no_update_since = None
        if self._not_started and self.engine.num_waiting != waiting:
            self._record_started(started_at)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def _record_started(self, started_at: float) -> None:
        not_started = []
        for request in self._not_started:
            if request.sequence.num_stored or request.finish_reason is not None:
                self._started[request.id] = started_at
            else:
                not_started.append(request)
        self._not_started = not_started

    def record(self) -> RunRecord:
        """Return the record of the run, with requests numbered from 0."""
        first = self.requests[0].id
        times: list[list[float]] = [[] for _ in self.requests]
        steps = [
            replace(step, requests=[number - first for number in step.requests])
            for step in self._steps
        ]
        for step in steps:
            for number in step.requests:
                times[number].append(step.ended_at)
        timelines = []
        for request, arrived, token_times in zip(self.requests, self._arrived, times, strict=True):
            name = f"request {request.id}"
            if request.error is not None:
                raise RequestFailed(f"{name}: failed: {request.error}") from request.error
            if len(token_times) != request.num_generated:
                raise RequestFailed(
                    f"{name}: {request.num_generated} tokens generated, "
                    f"{len(token_times)} delivered"
                )
            timelines.append(Timeline(arrived, self._started[request.id], tuple(token_times)))
        prompt_lengths = [request.prompt_length for request in self.requests]
        token_ids = [request.token_ids for request in self.requests]
        return RunRecord(self.started_at, steps, timelines, prompt_lengths, token_ids)


# Lower bound of the decode time: each needed byte read once, at full bandwidth.


_COPY_BYTES_ON_GPU = 1 << 28
"""Bytes of the copy: no more than a KV cache of maximal size leaves free."""


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    """Lower bound of decode time by memory traffic."""

    weight_bytes: int
    """Bytes of weights that every step reads at least, for any batch."""
    token_bytes: int
    """Bytes of one token's keys and values in all layers."""
    bandwidth: float
    """Bytes per second of a large copy."""

    def seconds(self, passes: int, stored_tokens: int) -> float:
        """Return the least seconds of forward passes that attend to ``stored_tokens`` in all."""
        return (passes * self.weight_bytes + stored_tokens * self.token_bytes) / self.bandwidth

    def facts(self) -> dict[str, float]:
        return {
            "copy_bandwidth_gb_per_s": self.bandwidth / 1e9,
            "weights_mb_per_step": self.weight_bytes / 1e6,
            "kv_bytes_per_token": self.token_bytes,
        }


def memory_floor(skeleton: Any, llm: LLM) -> MemoryFloor:
    """Measure the floor; ``skeleton`` is the network with its weights not yet rearranged."""
    model = llm.engine.sequence_runner.model
    values = 2 * model.shape.num_layers * model.shape.num_kv_heads * model.shape.head_dim
    return MemoryFloor(
        count_weights_read(skeleton) * model.dtype.itemsize,
        values * model.dtype.itemsize,
        copy_bandwidth(model.device, _COPY_BYTES_ON_GPU),
    )


def count_weights_read(network: Any) -> int:
    """Count the weights that a decode step reads at least.

    These are all weights except embeddings, because it reads only single rows of them, and except
    experts that the router does not select for one row.
    """
    head = network.get_output_embeddings().weight
    tables = {
        id(module.weight)
        for module in network.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    read: int = sum(weight.numel() for weight in network.parameters() if id(weight) not in tables)
    return read - sum(map(_count_idle_expert_weights, network.modules()))


def _count_idle_expert_weights(module: Any) -> int:
    top_k: int | None = getattr(getattr(module, "gate", None), "top_k", None)
    if top_k is None or not hasattr(module, "experts"):
        return 0
    weights: list[Tensor] = [*module.experts.parameters()]
    return sum((len(each) - top_k) * (each.numel() // len(each)) for each in weights)


# Figures of a run, and medians over several runs. docs/how-to/benchmarks.md defines each one.


Row = TypeVar("Row", bound="ThroughputRow | LatencyRow")


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """Throughput of all requests of a run together."""

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
    floor_ratio: float | None

    @classmethod
    def of(cls, name: str, record: RunRecord, floor: MemoryFloor) -> ThroughputRow:
        prompt, completion = sum(record.prompt_lengths), sum(map(len, record.token_ids))
        total_s = record.steps[-1].ended_at - record.started_at
        steps = record.decode_steps()
        decode_s = sum(step.ended_at - step.started_at for step in steps)
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
            floor_ratio=decode_s / decode_floor_s(record, steps, floor) if steps else None,
        )


def throughput(name: str, records: Sequence[RunRecord], floor: MemoryFloor) -> ThroughputRow:
    """Return the row with each figure's median over the runs."""
    runs = [ThroughputRow.of(name, record, floor) for record in records]
    totals = [run.total_s for run in runs]
    return replace(median_row(runs), fastest_s=min(totals), slowest_s=max(totals))


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Percentiles of one latency over the requests of a run; ITL over all of their gaps."""

    run: str
    metric: str
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None

    @classmethod
    def of(cls, run: str, metric: str, seconds: Sequence[float]) -> LatencyRow:
        if not seconds:
            return cls(run, metric)
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
        return cls(run, metric, p50 * 1e3, p95 * 1e3, p99 * 1e3, fmean(seconds) * 1e3)


_LATENCIES: dict[str, Callable[[Timeline], Sequence[float | None]]] = {
    "TTFT": lambda seen: [seen.tokens[0] - seen.arrived],
    "TPOT": lambda seen: [seen.time_per_output_token],
    "ITL": lambda seen: seen.gaps(),
    "latency": lambda seen: [seen.tokens[-1] - seen.arrived],
    "queue wait": lambda seen: [seen.started - seen.arrived],
}


def latencies(run: str, timelines: Sequence[Timeline]) -> list[LatencyRow]:
    return [
        LatencyRow.of(
            run, metric, [s for timeline in timelines for s in values(timeline) if s is not None]
        )
        for metric, values in _LATENCIES.items()
    ]


def decode_floor_s(record: RunRecord, steps: Sequence[StepRecord], floor: MemoryFloor) -> float:
    """Return the least seconds to read the weights per pass, and the stored tokens per new one."""
    step_ids = {id(step) for step in steps}
    lengths = list(record.prompt_lengths)
    stored = 0
    for step in record.steps:
        for number in step.requests:
            stored += lengths[number] if id(step) in step_ids else 0
            lengths[number] += 1
    return floor.seconds(sum(step.passes for step in steps), stored)


def median_row(rows: Sequence[Row]) -> Row:
    """Return each field's median; strings, and fields with None, are those of the first row."""
    values: dict[str, Any] = {}
    for field in fields(rows[0]):
        column = [getattr(row, field.name) for row in rows]
        first = column[0]
        numbers = isinstance(first, (int, float)) and None not in column
        values[field.name] = type(first)(median(column)) if numbers else first
    return type(rows[0])(**values)
