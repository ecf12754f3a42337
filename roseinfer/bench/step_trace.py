"""``trace``: the time of a steady decode step, the host's work beside the device's.

No profiler takes part in what is timed, since it would slow down the host alone. The host's clock
is read around each step and each wait, and the device marks the begin and the end of each step's
graph. Which kernels the device's time goes to is asked of other steps.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from roseinfer.bench import step_kernels
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.reporting import Report, Table, unavailable_table
from roseinfer.bench.serving.driving import random_prompts, require_positions
from roseinfer.bench.serving.memory_floor import memory_floor
from roseinfer.bench.step_kernels import measure_kernels
from roseinfer.bench.timing import device_mark
from roseinfer.errors import ConfigError
from roseinfer.how_far import counted
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from roseinfer.bench.serving.memory_floor import MemoryFloor
    from roseinfer.bench.step_kernels import KernelRow
    from roseinfer.engine.engine import Engine
    from roseinfer.llm import LLM

_STEPS = """\
All sequences decode, none comes or goes; medians. A step is what the host works and what it waits
for the device. device works us: from when the device began with a step's graph until it was done
with it, which is all it does in a step but a few small copies. floor us: the time to read once the
weights and the stored keys and values, at the measured copy bandwidth; times floor: the step over
that."""
_SPANS = "Some of those steps: what ran from when to when."
_SETTLE = 8
"""Steps before the first that is timed."""
_DRAWN = 4
"""Steps whose spans are kept."""
_NO_KERNELS = "they are timed on a GPU"

Interval = tuple[float, float]
Lanes = dict[str, list[Interval]]
"""The intervals of ``step``, ``wait`` and ``device``, in seconds on the host's clock, in order."""


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    sequences: int
    step_us: float
    host_works_us: float
    host_waits_us: float
    device_works_us: float | None
    """The time on a step's graph; None where none is replayed."""
    floor_us: float
    times_floor: float


@dataclass(frozen=True, slots=True)
class SpanRow:
    """An interval on a lane of the chart, counted from the begin of the first drawn step."""

    sequences: int
    who: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Traced:
    """What is known of the steps of so many sequences."""

    row: StepTimeRow
    spans: list[SpanRow]
    kernels: list[KernelRow]


def run(args: argparse.Namespace) -> Report:
    source = ModelSource.of(args)
    gpus = args.tensor_parallel_size
    llm = source.llm({"max_batch_size": max(args.sequences), "tensor_parallel_size": gpus})
    for sequences in args.sequences:  # refuses what does not fit before anything is timed
        tokens_of_each(llm.engine, sequences, args.context, args.steps)
    floor = memory_floor(source.skeleton(), llm)
    floor = replace(floor, weight_bytes=floor.weight_bytes // gpus)  # each reads its share
    traced = [
        measure(llm, sequences, args.context, args.steps, floor)
        for sequences in counted(args.sequences, "trace", "numbers of sequences")
    ]
    model = llm.engine.sessions.model
    asked = {name: getattr(args, name) for name in ("context", "steps")}
    config = {**source.described(model.dtype), **asked}
    if gpus > 1:
        config["tensor_parallel_size"] = gpus
    config["family"] = type(model).__name__
    config["run_ahead"] = llm.config.lag(model.device.type)
    spans = [span for each in traced for span in each.spans]
    kernels = [row for each in traced for row in each.kernels]
    tables = (
        Table("steps", _STEPS, [each.row for each in traced]),
        Table("kernels", step_kernels.CAPTION, kernels, headings=step_kernels.HEADINGS),
        unavailable_table([] if kernels else [("the kernels of a step", _NO_KERNELS)]),
        Table("spans", _SPANS, spans, printed=False),
    )
    return Report("trace", args.command, model.device, config, tables, floor.facts())


def measure(llm: LLM, sequences: int, context: int, steps: int, floor: MemoryFloor) -> Traced:
    """Trace steps in which so many requests decode and none comes or goes."""
    engine = llm.engine
    new = tokens_of_each(engine, sequences, context, steps)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    prompts = random_prompts(sequences, context, engine.sessions.model.shape.vocab_size)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    try:
        while not all(request.num_generated for request in requests):
            engine.step()
        for _ in range(_SETTLE):
            engine.step()
        lanes = trace(engine, steps)
        # In the middle of the steps that were timed.
        stored = sum(len(each.session.token_ids) for each in requests) - sequences * steps // 2
        row = row_of(sequences, lanes, floor.seconds(1, stored) * 1e6)
        kernels: list[KernelRow] = []
        if engine.sessions.kv.device.type == "cuda":
            step_us = row.device_works_us or row.step_us
            kernels = measure_kernels(engine, sequences, step_us, floor.bandwidth)
        assert not any(each.preempted or each.finish_reason for each in requests)
    finally:
        for request in requests:
            engine.cancel(request)
    return Traced(row, spans_of(sequences, lanes), kernels)


def tokens_of_each(engine: Engine, sequences: int, context: int, steps: int) -> int:
    """Return how many new tokens keep every sequence decoding up to the last step.

    The first sequence goes on while the others' prompts are stored, and every step of that either
    ends a prompt or takes its fill. Raise where so many cannot decode side by side for so long.
    """
    filling = sequences + sequences * context // engine.config.prefill_max_tokens
    ending = 1  # a request ends with its last token
    new = filling + _SETTLE + steps + step_kernels.STEPS + ending
    advice = "ask for less --context, fewer --steps or --sequences"
    require_positions(engine, context, new, advice)
    kv = engine.sessions.kv
    blocks = sequences * -(-(context + new) // kv.block_size)
    if blocks >= kv.max_blocks_per_layer:
        raise ConfigError(
            f"the KV cache has no room for {sequences} sequences of up to {context + new} tokens, "
            f"which take {blocks} blocks of {kv.max_blocks_per_layer - 1}: {advice}"
        )
    return new


def trace(engine: Engine, steps: int) -> Lanes:
    if engine.sessions.kv.device.type != "cuda":
        return {"step": _timed(engine, steps), "wait": [], "device": []}
    with noted_waits() as waits, noted_replays() as replays:
        found = _timed(engine, steps)
    return {"step": found, "wait": waits, "device": replays()}


def _timed(engine: Engine, steps: int) -> list[Interval]:
    found: list[Interval] = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        found.append((begin, time.perf_counter()))
    return found


@contextmanager
def noted_replays() -> Iterator[Callable[[], list[Interval]]]:
    """Note when the device runs each graph; the function yielded tells it on the host's clock."""
    first = device_mark()
    first.synchronize()
    zero = time.perf_counter()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    real = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        begin = device_mark()
        real(graph)
        marks.append((begin, device_mark()))

    def moment(mark: torch.cuda.Event) -> float:
        return float(zero + first.elapsed_time(mark) / 1e3)

    def intervals() -> list[Interval]:
        torch.cuda.synchronize()
        return [(moment(begin), moment(end)) for begin, end in marks]

    with patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield intervals


@contextmanager
def noted_waits() -> Iterator[list[Interval]]:
    """Note when the host waits for an event, which is all it waits for in a steady step."""
    waits: list[Interval] = []
    real = torch.cuda.Event.synchronize

    def synchronize(event: torch.cuda.Event) -> None:
        begin = time.perf_counter()
        real(event)
        waits.append((begin, time.perf_counter()))

    with patch.object(torch.cuda.Event, "synchronize", synchronize):
        yield waits


def row_of(sequences: int, lanes: Lanes, floor_us: float) -> StepTimeRow:
    lengths = [end - begin for begin, end in lanes["step"]]
    waited = [covered(lanes["wait"], step) for step in lanes["step"]]
    works = [length - wait for length, wait in zip(lengths, waited, strict=True)]
    device = [end - begin for begin, end in lanes["device"]]
    step, work, wait = (median(seconds) * 1e6 for seconds in (lengths, works, waited))
    device_us = median(device) * 1e6 if device else None
    return StepTimeRow(sequences, step, work, wait, device_us, floor_us, step / floor_us)


def spans_of(sequences: int, lanes: Lanes) -> list[SpanRow]:
    """Return the spans of a few steps in the middle."""
    middle = len(lanes["step"]) // 2
    drawn = lanes["step"][middle : middle + _DRAWN]
    begin, end = drawn[0][0], drawn[-1][1]
    return [
        SpanRow(sequences, who, (max(first, begin) - begin) * 1e6, (min(last, end) - begin) * 1e6)
        for who, spans in lanes.items()
        for first, last in spans
        if first < end and last > begin
    ]


def covered(spans: Iterable[Interval], within: Interval) -> float:
    """Add up how much of an interval lies in ``spans``, which do not overlap."""
    begin, end = within
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)
