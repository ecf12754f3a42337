"""``trace``: the time of a steady decode step, the host's work beside the device's.

No profiler takes part in what is timed, since it would slow down the host alone. The host's clock
is read around each step and each wait, and the device marks the begin and the end of each step's
graph. Which kernels the device's time goes to is asked of other steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from roseinfer.bench.driving import memory_floor, random_prompts, require_positions
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import device_events, device_mark, synchronizer
from roseinfer.decode.graphs import StepGraphs
from roseinfer.errors import ConfigError
from roseinfer.progress import counted
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from roseinfer.bench.driving import MemoryFloor
    from roseinfer.decode.graphs import StepKind
    from roseinfer.engine.engine import Engine
    from roseinfer.llm import LLM

# What each kernel takes in a decode step, beside the time that the bytes it declares would take.
#
# torch's profiler listens while some steps run, which are not those that are timed.


CAPTION = """\
The kernels and copies of those steps, by torch's profiler in other steps of the same requests; the
longest first. us: of all calls in a step. Kernels that start early overlap and wait within their
time, so that shares of the step can be more than one together. MB: what a kernel declares to read
and write in a step, every place once. bytes us: the time of that at the measured copy bandwidth.
Kernels that are not ours declare nothing."""
HEADINGS = {
    "sequences": "sequences",
    "kernel": "kernel",
    "calls": "calls",
    "us": "us",
    "share": "share",
    "declared_mb": "MB",
    "bytes_us": "bytes us",
}
PROFILED = 20
"""Steps that the profiler listens to."""
STEPS = PROFILED + 1
"""Steps that all of this takes."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    sequences: int
    kernel: str
    calls: float
    """In a step, as the times and the bytes are."""
    us: float
    share: float
    """Of the time of a step that no profiler listened to."""
    declared_mb: float | None = None
    bytes_us: float | None = None


def measure_kernels(
    engine: Engine, sequences: int, step_us: float, bandwidth: float
) -> list[KernelRow]:
    """Run steps in which all sequences decode; ``step_us`` is what such a step takes."""
    sync = synchronizer(engine.sessions.kv.device)
    events = device_events(engine.step, PROFILED, sync)
    with launched_not_replayed(), declared_bytes() as declared:
        engine.step()
    return kernel_rows(sequences, events, declared, step_us, bandwidth)


def kernel_rows(
    sequences: int,
    events: Iterable[tuple[str, float]],
    declared: Mapping[str, int],
    step_us: float,
    bandwidth: float,
) -> list[KernelRow]:
    """Add up the events of all profiled steps by kernel."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in events:
        durations[short_name(name)].append(microseconds)
    rows = []
    for kernel, taken in durations.items():
        us, moved = sum(taken) / PROFILED, declared.get(kernel)
        row = KernelRow(sequences, kernel, len(taken) / PROFILED, us, us / step_us)
        if moved is not None:
            row = replace(row, declared_mb=moved / 1e6, bytes_us=moved / bandwidth * 1e6)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.us)


def short_name(kernel: str) -> str:
    """Return a kernel's own name, without types, namespaces and arguments."""
    name = kernel.partition("<")[0].removeprefix("void ").rpartition("::")[2].partition("(")[0]
    return name.rpartition(".")[2].strip()


@contextmanager
def launched_not_replayed() -> Iterator[None]:
    """Run steps kernel by kernel instead of replaying their graphs, so that each can be seen."""

    def run(graphs: StepGraphs, count: int, kind: StepKind) -> None:
        graphs._step(count, kind)

    with patch.object(StepGraphs, "run", run):
        yield


@contextmanager
def declared_bytes() -> Iterator[dict[str, int]]:
    """Add up, by kernel, the bytes that launches of our kernels declare meanwhile."""
    from triton import knobs
    from triton.runtime.jit import KernelInterface

    found: dict[str, int] = defaultdict(int)
    real: Callable[[Any, Any], Any] = KernelInterface.__getitem__

    def noting(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = real(kernel, grid)
        declaration = getattr(kernel.fn, "moves", None)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if declaration is not None:
                given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
                found[kernel.fn.__name__] += sum(map(_settled, declaration(given).values()))
            return launch(*args, **kwargs)

        return noted

    def hear(launch: Any) -> None:
        told = launch.get()
        if "moves" in told:
            found[told["name"]] += sum(_settled(amount) for _, amount in told["moves"]())

    hook = knobs.runtime.launch_enter_hook
    hook.add(hear)
    try:
        with patch.object(KernelInterface, "__getitem__", noting):
            yield found
    finally:
        hook.remove(hear)


def _settled(amount: int | Callable[[], int]) -> int:
    """Work out an amount that depends on what tensors hold when the kernel runs."""
    return amount if isinstance(amount, int) else int(amount())


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
        Table("kernels", CAPTION, kernels, headings=HEADINGS),
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
    new = filling + _SETTLE + steps + STEPS + ending
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
