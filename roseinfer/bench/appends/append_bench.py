"""``append``: the cost of an append to the KV cache on every path, on the host and the device.

Two arrangements of the same cache are timed. *Per layer*: every layer has its own block
lists and one ``append_token_batch`` a step. *Grouped*: all layers share their lists, and a step
is planned once and then written layer by layer. The baseline is a loop of ``append_token``
over every layer and sequence, whose tokens are split before the clock starts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from roseinfer.bench.appends.append_rig import POLICIES, AppendConfig, Rig
from roseinfer.bench.appends.append_work import (
    clone_us,
    clone_work,
    grouped_step,
    layer_write,
    per_layer_step,
    per_token,
    plan_us,
)
from roseinfer.bench.reporting import Report, Table, unavailable_table
from roseinfer.bench.timing import (
    copy_bandwidth,
    graph_sampler,
    in_rounds,
    kernel_us,
    one_thread,
    why_triton_cannot_be_timed,
)
from roseinfer.config import (
    TRITON_FULL_BATCH_MIN_BATCH,
    TRITON_MIN_BATCH,
    TRITON_SWITCH,
    AppendPolicy,
)
from roseinfer.kv.paths import Path
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_WRITES = """\
One layer's tokens written, us per call. device us: the call's kernels by the profiler, each at
its median. graph us: per call in a replayed CUDA graph of many. floor: 4 x batch x heads x
head_dim x itemsize bytes (the new keys and values, read once and written once) at the measured
copy bandwidth. times floor: device time over it, or host time where there is no device time."""
_STEPS = """\
One token for every sequence in all layers, us, until the device is done. plan us: host time of
planning a step whose tokens all go in place. per layer: append_token_batch for each layer.
grouped: planned once, then one write a layer. speedup: against the per-token loop."""
_CLONES = """\
Copy-on-write: planning a step in which every sequence must copy its block, in all layers at
once. floor: those blocks read once and written once."""
_CLONE_PATHS = (Path.CLONE_TORCH, Path.CLONE_TRITON)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WRITES_PER_GRAPH = 96
_CLONES_PER_SAMPLE = 64
"""Blocks copied in one sample, or one for every sequence where those are more."""


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Moving data once: a layer's tokens or, in a clone, every sequence's block of all layers."""

    batch: int
    path_that_ran: str
    host_us: float
    device_us: float | None
    graph_us: float | None
    floor_us: float
    times_floor: float


@dataclass(frozen=True, slots=True)
class StepRow:
    batch: int
    path_that_ran: str
    plan_us: float | None
    per_layer_us: float
    per_layer_speedup: float
    grouped_us: float | None = None
    grouped_speedup: float | None = None


@one_thread()
def run(args: argparse.Namespace) -> Report:
    device = resolve_device(args.device)
    config = AppendConfig(
        batches=tuple(args.batch),
        layers=args.layers,
        heads=args.heads,
        head_dim=args.head_dim,
        block_size=args.block_size,
        device=device,
        dtype=_DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")],
        rounds=3 if args.quick else 15,
    )
    why_not = {
        (path, batch): why_left_out(path, batch, device)
        for path in POLICIES
        for batch in config.batches
    }
    bandwidth = copy_bandwidth(device)
    writes: list[WriteRow] = []
    steps: list[StepRow] = []
    clones: list[WriteRow] = []
    for batch in config.batches:
        paths = [path for path in POLICIES if not why_not[path, batch]]
        batched = [path for path in paths if path not in (Path.PER_TOKEN, *_CLONE_PATHS)]
        layered, grouped = Rig(config, batch, 1), Rig(config, batch, config.layers)
        writes += _measure_writes(layered, grouped, batched, bandwidth)
        steps += _measure_steps(layered, grouped, batched)
        clones += _measure_clones(grouped, [p for p in paths if p in _CLONE_PATHS], bandwidth)
        del layered, grouped  # before the next two are built
    missing = dict.fromkeys((path, reason) for (path, _), reason in why_not.items() if reason)
    return Report(
        "append",
        args.command,
        device,
        {**asdict(config), "device": str(device), "dtype": str(config.dtype)},
        (
            Table("writes", _WRITES, writes),
            Table("steps", _STEPS, steps),
            Table("clones", _CLONES, clones),
            unavailable_table(missing),
        ),
        {"copy_bandwidth_gb_per_s": bandwidth / 1e9},
    )


def why_left_out(path: Path, batch: int, device: torch.device) -> str:
    """Return why ``path`` is not timed with so many sequences, or an empty text where it is."""
    asked = AppendPolicy.from_env()  # refuses a bad variable
    if not path.needs_triton:
        return ""
    if reason := why_triton_cannot_be_timed(device):
        return reason
    if not asked.triton:
        return f"{TRITON_SWITCH} is off"
    variable, least = TRITON_MIN_BATCH, asked.triton_min_batch
    if path is Path.TRITON_FULL_BATCH and asked.triton_full_batch_min_batch is not None:
        variable, least = TRITON_FULL_BATCH_MIN_BATCH, asked.triton_full_batch_min_batch
    if path is not Path.CLONE_TRITON and batch < least:
        return f"batch {batch}: {variable} asks for at least {least} tokens"
    return ""


def _measure_writes(
    layered: Rig, grouped: Rig, paths: Sequence[Path], bandwidth: float
) -> list[WriteRow]:
    config, batch = grouped.config, grouped.batch
    works = [per_token(layered, layers_per_call=1)]
    works += [layer_write(grouped, path) for path in paths]
    samplers = {("host", work.path): work.sampler(wait=False) for work in works}
    device: dict[Path, float | None] = {}
    if config.device.type == "cuda":
        for work in works:
            samplers["host", work.path]()  # compiles what is about to be captured
            calls = config.layers if work.path is Path.PER_TOKEN else _WRITES_PER_GRAPH
            device[work.path] = work.series(kernel_us, calls)
            samplers["graph", work.path] = work.series(graph_sampler, calls)
    us = in_rounds(samplers, config.rounds, f"batch {batch}: writes")
    floor = batch * config.token_bytes / bandwidth * 1e6
    return [
        _row(batch, path, us["host", path], device.get(path), us.get(("graph", path)), floor)
        for path in (Path.PER_TOKEN, *paths)
    ]


def _measure_clones(rig: Rig, paths: Sequence[Path], bandwidth: float) -> list[WriteRow]:
    config, batch = rig.config, rig.batch
    steps = max(1, min(config.block_size - 1, _CLONES_PER_SAMPLE // batch))
    samplers = {path: partial(clone_us, rig, path, steps) for path in paths}
    us = in_rounds(samplers, config.rounds, f"batch {batch}: copy-on-write")
    floor = batch * config.layers * config.block_size * config.token_bytes / bandwidth * 1e6
    rows = []
    on_gpu = config.device.type == "cuda"
    for path, host in us.items():
        device = clone_work(rig, path).series(kernel_us, steps) if on_gpu else None
        rows.append(_row(batch, path, host, device, None, floor))
    return rows


def _row(
    batch: int, path: Path, host: float, device: float | None, graph: float | None, floor: float
) -> WriteRow:
    return WriteRow(batch, path, host, device, graph, floor, (device or host) / floor)


def _measure_steps(layered: Rig, grouped: Rig, paths: Sequence[Path]) -> list[StepRow]:
    config, batch = grouped.config, grouped.batch
    samplers = {("per layer", Path.PER_TOKEN): per_token(layered, config.layers).sampler(wait=True)}
    for path in paths:
        samplers["per layer", path] = per_layer_step(layered, path).sampler(wait=True)
        samplers["grouped", path] = grouped_step(grouped, path).sampler(wait=True)
        samplers["plan", path] = partial(plan_us, grouped, path, config.block_size - 1)
    us = in_rounds(samplers, config.rounds, f"batch {batch}: steps")
    loop = us["per layer", Path.PER_TOKEN]
    rows = [StepRow(batch, Path.PER_TOKEN, None, loop, 1.0)]
    for path in paths:
        plan, apart, together = (us[kind, path] for kind in ("plan", "per layer", "grouped"))
        rows.append(StepRow(batch, path, plan, apart, loop / apart, together, loop / together))
    return rows
