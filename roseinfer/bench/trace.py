"""``trace``: the time of a steady decode step, split into host work, waits and device work.

No profiler is on while steps are timed, since it would slow down the host alone. The host's clock
is read around each step and each wait, and events on the device mark the begin and the end of each
step's graph. The times of kernels come from other steps, which are profiled.
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

from roseinfer.bench.driver import memory_floor, random_prompts, require_positions
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import device_events, record_device_event, synchronizer
from roseinfer.decode.graphs import StepGraphs
from roseinfer.errors import ConfigError
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import track_items

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from roseinfer.bench.driver import MemoryFloor
    from roseinfer.decode.graphs import StepKind
    from roseinfer.engine.engine import Engine
    from roseinfer.llm import LLM

# Time of each kernel in a decode step, and the time that its declared traffic would take.
#
# torch's profiler records steps other than the timed ones.


CAPTION = """\
The kernels and copies of those steps, by torch's profiler in other steps of the same requests; the
longest first. us: all calls in a step. Kernels that start early overlap, and their waits count, so
the shares of a step can exceed 1 in sum. MB: declared traffic of a kernel per step, each byte read
or written once. bytes us: time of that traffic at the measured copy bandwidth. Kernels of torch and
other libraries declare no traffic."""
HEADINGS = {
    "sequences": "sequences",
    "kernel": "kernel",
    "calls": "calls",
    "us": "us",
    "share": "share",
    "traffic_mb": "MB",
    "traffic_us": "bytes us",
}
NUM_PROFILED_STEPS = 20
"""Profiled steps."""
STEPS = NUM_PROFILED_STEPS + 1
"""Steps that the measurement of kernels takes: the profiled ones, and one for the traffic."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Calls, time and traffic of one kernel, per step."""

    sequences: int
    kernel: str
    calls: float
    us: float
    share: float
    """Fraction of the time of a step without the profiler."""
    traffic_mb: float | None = None
    traffic_us: float | None = None


def measure_kernels(
    engine: Engine, sequences: int, step_us: float, bandwidth: float
) -> list[KernelRow]:
    """Profile steps in which all sequences decode; ``step_us`` is the time of an unprofiled one."""
    sync = synchronizer(engine.sequence_runner.kv.device)
    events = device_events(engine.step, NUM_PROFILED_STEPS, sync)
    with bypass_graphs(), record_declared_traffic() as declared:
        engine.step()
    return kernel_rows(sequences, events, declared, step_us, bandwidth)


def kernel_rows(
    sequences: int,
    events: Iterable[tuple[str, float]],
    declared: Mapping[str, int],
    step_us: float,
    bandwidth: float,
) -> list[KernelRow]:
    """Sum the events of all profiled steps by kernel; return the longest kernels first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in events:
        durations[short_name(name)].append(microseconds)
    rows = []
    for kernel, times in durations.items():
        us, traffic = sum(times) / NUM_PROFILED_STEPS, declared.get(kernel)
        row = KernelRow(sequences, kernel, len(times) / NUM_PROFILED_STEPS, us, us / step_us)
        if traffic is not None:
            row = replace(row, traffic_mb=traffic / 1e6, traffic_us=traffic / bandwidth * 1e6)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.us)


def short_name(kernel: str) -> str:
    """Return a kernel's bare name, without types, namespaces and arguments."""
    name = kernel.partition("<")[0].removeprefix("void ").rpartition("::")[2].partition("(")[0]
    return name.rpartition(".")[2].strip()


@contextmanager
def bypass_graphs() -> Iterator[None]:
    """Launch kernels one by one instead of replaying graphs, so that each launch is recorded."""

    def run(graphs: StepGraphs, count: int, kind: StepKind) -> None:
        graphs._step(count, kind)

    with patch.object(StepGraphs, "run", run):
        yield


@contextmanager
def record_declared_traffic() -> Iterator[dict[str, int]]:
    """Sum, by kernel, the traffic in bytes that launches of our kernels declare in the block."""
    from triton import knobs
    from triton.runtime.jit import KernelInterface

    traffic: dict[str, int] = defaultdict(int)
    real: Callable[[Any, Any], Any] = KernelInterface.__getitem__

    def get_launch(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = real(kernel, grid)
        declaration = getattr(kernel.fn, "traffic", None)

        def recorded_launch(*args: Any, **kwargs: Any) -> Any:
            if declaration is not None:
                arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
                traffic[kernel.fn.__name__] += sum(
                    map(_resolve_amount, declaration(arguments).values())
                )
            return launch(*args, **kwargs)

        return recorded_launch

    def record_launch(launch: Any) -> None:
        metadata = launch.get()
        if "traffic" in metadata:
            traffic[metadata["name"]] += sum(
                _resolve_amount(amount) for _, amount in metadata["traffic"]()
            )

    hook = knobs.runtime.launch_enter_hook
    hook.add(record_launch)
    try:
        with patch.object(KernelInterface, "__getitem__", get_launch):
            yield traffic
    finally:
        hook.remove(record_launch)


def _resolve_amount(amount: int | Callable[[], int]) -> int:
    """Return an amount of bytes; evaluate one that depends on the contents of tensors."""
    return amount if isinstance(amount, int) else int(amount())


_STEPS = """\
All sequences decode, and none starts or ends; medians. step us: host busy us plus host wait us, the
wait for the device. device busy us: from begin to end of a step's graph on the device, which is all
of its work but a few small copies. floor us: the time to read the weights and the stored keys and
values once, at the measured copy bandwidth. floor ratio: step over floor."""
_SPANS = "Intervals of some of those steps."
_WARMUP_STEPS = 8
"""Steps before the first timed one."""
_DRAWN = 4
"""Steps whose spans are in the report."""
_NO_KERNELS = "they are timed on a GPU only"

Interval = tuple[float, float]
Lanes = dict[str, list[Interval]]
"""Intervals of ``step``, ``wait`` and ``device``, in seconds on the host's clock, in order."""


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    """Times of a step of some number of sequences."""

    sequences: int
    step_us: float
    host_busy_us: float
    host_wait_us: float
    device_busy_us: float | None
    """Time of a step's graph; None if no graph is replayed."""
    floor_us: float
    floor_ratio: float


@dataclass(frozen=True, slots=True)
class SpanRow:
    """Interval on a lane of the chart, relative to the begin of the first drawn step."""

    sequences: int
    lane: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Step times, spans and kernels for one number of sequences."""

    row: StepTimeRow
    spans: list[SpanRow]
    kernels: list[KernelRow]


def run(args: argparse.Namespace) -> Report:
    source = ModelSource.of(args)
    gpus = args.tensor_parallel_size
    llm = source.llm({"max_batch_size": max(args.sequences), "tensor_parallel_size": gpus})
    for sequences in args.sequences:  # raises before anything is timed if they do not fit
        num_new_tokens(llm.engine, sequences, args.context, args.steps)
    floor = memory_floor(source.skeleton(), llm)
    floor = replace(floor, weight_bytes=floor.weight_bytes // gpus)  # each GPU reads its share
    traces = [
        measure(llm, sequences, args.context, args.steps, floor)
        for sequences in track_items(args.sequences, "trace", "numbers of sequences")
    ]
    model = llm.engine.sequence_runner.model
    settings = {name: getattr(args, name) for name in ("context", "steps")}
    config = {**source.describe(model.dtype), **settings}
    if gpus > 1:
        config["tensor_parallel_size"] = gpus
    config["family"] = type(model).__name__
    config["run_ahead"] = llm.config.max_steps_in_flight(model.device.type)
    spans = [span for each in traces for span in each.spans]
    kernels = [row for each in traces for row in each.kernels]
    tables = (
        Table("steps", _STEPS, [each.row for each in traces]),
        Table("kernels", CAPTION, kernels, headings=HEADINGS),
        unavailable_table([] if kernels else [("the kernels of a step", _NO_KERNELS)]),
        Table("spans", _SPANS, spans, printed=False),
    )
    return Report("trace", args.command, model.device, config, tables, floor.facts())


def measure(llm: LLM, sequences: int, context: int, steps: int, floor: MemoryFloor) -> StepTrace:
    """Trace steps in which all requests decode, and none starts or ends."""
    engine = llm.engine
    new = num_new_tokens(engine, sequences, context, steps)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    prompts = random_prompts(sequences, context, engine.sequence_runner.model.shape.vocab_size)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    try:
        while not all(request.num_generated for request in requests):
            engine.step()
        for _ in range(_WARMUP_STEPS):
            engine.step()
        lanes = trace(engine, steps)
        # Stored tokens in the middle of the timed steps.
        stored = sum(len(each.sequence.token_ids) for each in requests) - sequences * steps // 2
        row = make_step_row(sequences, lanes, floor.seconds(1, stored) * 1e6)
        kernels: list[KernelRow] = []
        if engine.sequence_runner.kv.device.type == "cuda":
            step_us = row.device_busy_us or row.step_us
            kernels = measure_kernels(engine, sequences, step_us, floor.bandwidth)
        assert not any(each.times_preempted or each.finish_reason for each in requests)
    finally:
        for request in requests:
            engine.cancel(request)
    return StepTrace(row, select_spans(sequences, lanes), kernels)


def num_new_tokens(engine: Engine, sequences: int, context: int, steps: int) -> int:
    """Return the number of new tokens that keeps all sequences decoding up to the last step.

    The first sequence decodes while the other prompts are prefilled; each step of that ends a
    prompt or uses its whole token budget. Raise if the sequences do not fit together.
    """
    prefill_steps = sequences + sequences * context // engine.config.max_prompt_tokens
    last = 1  # a request ends with its last token
    new = prefill_steps + _WARMUP_STEPS + steps + STEPS + last
    advice = "lower --context, --steps or --sequences"
    require_positions(engine, context, new, advice)
    kv = engine.sequence_runner.kv
    blocks = sequences * -(-(context + new) // kv.block_size)
    if blocks >= kv.max_blocks_per_layer:
        raise ConfigError(
            f"{sequences} sequences of up to {context + new} tokens need {blocks} blocks; the KV "
            f"cache has {kv.max_blocks_per_layer - 1}: {advice}"
        )
    return new


def trace(engine: Engine, steps: int) -> Lanes:
    if engine.sequence_runner.kv.device.type != "cuda":
        return {"step": _timed(engine, steps), "wait": [], "device": []}
    with record_waits() as waits, record_replays() as replays:
        step_intervals = _timed(engine, steps)
    return {"step": step_intervals, "wait": waits, "device": replays()}


def _timed(engine: Engine, steps: int) -> list[Interval]:
    intervals: list[Interval] = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        intervals.append((begin, time.perf_counter()))
    return intervals


@contextmanager
def record_replays() -> Iterator[Callable[[], list[Interval]]]:
    """Record device events around graph replays; yield a function that returns their intervals."""
    first = record_device_event()
    first.synchronize()
    zero = time.perf_counter()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    real = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        begin = record_device_event()
        real(graph)
        marks.append((begin, record_device_event()))

    def moment(mark: torch.cuda.Event) -> float:
        return float(zero + first.elapsed_time(mark) / 1e3)

    def intervals() -> list[Interval]:
        torch.cuda.synchronize()
        return [(moment(begin), moment(end)) for begin, end in marks]

    with patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield intervals


@contextmanager
def record_waits() -> Iterator[list[Interval]]:
    """Record when the host waits for events, its only waits in a steady step."""
    waits: list[Interval] = []
    real = torch.cuda.Event.synchronize

    def synchronize(event: torch.cuda.Event) -> None:
        begin = time.perf_counter()
        real(event)
        waits.append((begin, time.perf_counter()))

    with patch.object(torch.cuda.Event, "synchronize", synchronize):
        yield waits


def make_step_row(sequences: int, lanes: Lanes, floor_us: float) -> StepTimeRow:
    lengths = [end - begin for begin, end in lanes["step"]]
    waited = [overlap(lanes["wait"], step) for step in lanes["step"]]
    works = [length - wait for length, wait in zip(lengths, waited, strict=True)]
    device = [end - begin for begin, end in lanes["device"]]
    step, work, wait = (median(seconds) * 1e6 for seconds in (lengths, works, waited))
    device_us = median(device) * 1e6 if device else None
    return StepTimeRow(sequences, step, work, wait, device_us, floor_us, step / floor_us)


def select_spans(sequences: int, lanes: Lanes) -> list[SpanRow]:
    """Return the spans of a few steps in the middle of the timed ones."""
    middle = len(lanes["step"]) // 2
    drawn = lanes["step"][middle : middle + _DRAWN]
    begin, end = drawn[0][0], drawn[-1][1]
    return [
        SpanRow(sequences, lane, (max(first, begin) - begin) * 1e6, (min(last, end) - begin) * 1e6)
        for lane, spans in lanes.items()
        for first, last in spans
        if first < end and last > begin
    ]


def overlap(spans: Iterable[Interval], within: Interval) -> float:
    """Return the length of an interval's overlap with ``spans``, which are disjoint."""
    begin, end = within
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)
