"""``python -m roseinfer.bench NAME``: run a benchmark, print its tables, keep its JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roseinfer.bench import charts, reporting
from roseinfer.bench.command import run_command
from roseinfer.bench.kernels import append, append_scaling, attention_bench
from roseinfer.bench.kernels.append import AppendConfig
from roseinfer.bench.kernels.triton_speed import why_triton_cannot_be_timed
from roseinfer.bench.options import add_outputs, whole
from roseinfer.bench.reporting import Report, Table, UnavailableRow, judge
from roseinfer.bench.steps import ladder_bench, step_trace_bench
from roseinfer.bench.timing import copy_bandwidth, one_thread
from roseinfer.config import TRITON_SWITCH, AppendPolicy
from roseinfer.errors import ConfigError
from roseinfer.kv.paths import Path as KVPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.reporting import StepRow, TargetRow, WriteRow

    _Policies = dict[KVPath, AppendPolicy]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_WRITES = """\
One layer's tokens written, us per call. floor: 4 x batch x heads x head_dim x itemsize bytes
(the new keys and values, read once and written once) at the measured copy bandwidth. times
floor: device time over it, or host time where there is no device time."""
_STEPS = """\
One token for every sequence in all layers, us, until the device is done. plan us: host time of
planning a step whose tokens all go in place; plan mean us: over a whole block, rollover
included. per layer: append_token_batch for each layer. grouped: planned once, then one write a
layer. speedup: against the per-token loop."""
_CLONES = """\
Copy-on-write: planning a step in which every sequence must copy its block, in all layers at
once. floor: those blocks read once and written once."""
_SCALING = "Planning a step, without tensors: mean over a whole block, rollover included."
_POOL = "A pool filled by sequences. Wanted: 1,000,000 blocks in under 2 s, at most 200 bytes each."
_SCHEDULING = """\
Deciding on a step in which all running requests decode and nobody comes or goes, us of host
time. Wanted: at most 2 us for each running request, whatever waits."""
_TARGETS = "Targets on an H200, 64 sequences, 12 layers of 12 heads of 64, bf16."

_LIMITS = {
    "planning a step, us": "<= 25",
    "layer write on the host, us": "<= 12",
    "layer write on the device, us": "<= 2.0",
    "step, per layer, times per-token loop": ">= 40",
    "step, grouped, times per-token loop": ">= 40",
}
_LIMITS_BATCH = 64
_LIMITS_SHAPE = ("cuda", torch.bfloat16, 12, 12, 64)
_LIMITS_PATHS = ("triton_full_batch", "triton_identity_pos")
"""Where an engine's steps end up: sequences at one position, or each at its own."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roseinfer.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    _add_append(commands)
    attention_bench.add(commands)
    _add_scheduling(commands)
    ladder_bench.add(commands)
    step_trace_bench.add(commands)
    _add_plot(commands)
    return run_command(parser, argv)


def _add_append(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("append", help="what an append to the KV cache costs, by path")
    add = parser.add_argument
    add("--batch", type=whole(1), nargs="+", default=[1, 8, 64, 256], help="sequences")
    add("--layers", type=whole(1), default=12)
    add("--heads", type=whole(1), default=12, help="KV heads")
    add("--head-dim", type=whole(1), default=64)
    add("--block-size", type=whole(2), default=64)
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--dtype", choices=_DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--scaling", action="store_true", help="also measure what planning depends on")
    add("--quick", action="store_true", help="few repeats: to see that it works")
    add_outputs(parser, plot=False)
    parser.set_defaults(run=_run_append)


@one_thread()
def _run_append(args: argparse.Namespace, command: str) -> Report:
    config = _append_config(args)
    writes: list[WriteRow] = []
    steps: list[StepRow] = []
    clones: list[WriteRow] = []
    can_write, can_clone, missing = _runnable(config.device)
    bandwidth = copy_bandwidth(config.device, config.copy_bytes)
    for batch in config.batches:
        layered, grouped = append.Rig(config, batch, 1), append.Rig(config, batch, config.layers)
        writes += append.measure_writes(layered, grouped, can_write, bandwidth)
        steps += append.measure_steps(layered, grouped, can_write)
        clones += append.measure_clones(grouped, can_clone, bandwidth)
        del layered, grouped  # before the next two are built
    return Report(
        benchmark="append",
        command=command,
        date=reporting.now(),
        machine=reporting.this_machine(config.device),
        config={field.name: _plain(getattr(config, field.name)) for field in fields(config)},
        facts={"copy_bandwidth_gb_per_s": bandwidth / 1e9},
        tables=(
            Table("writes", _WRITES, writes),
            Table("steps", _STEPS, steps),
            Table("clones", _CLONES, clones),
            Table("unavailable", "Paths that cannot run here.", missing),
            *(_scaling_tables(quick=args.quick) if args.scaling else ()),
            Table("targets", _TARGETS, append_targets(config, writes, steps)),
        ),
    )


def _append_config(args: argparse.Namespace) -> AppendConfig:
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU: use --device cpu")
    return AppendConfig(
        batches=tuple(args.batch),
        layers=args.layers,
        heads=args.heads,
        head_dim=args.head_dim,
        block_size=args.block_size,
        device=torch.empty(0, device=name).device,  # with its index
        dtype=_DTYPES[args.dtype or ("bf16" if name == "cuda" else "fp32")],
        rounds=3 if args.quick else 15,
        launches=24 if args.quick else 200,
        copy_bytes=1 << (24 if args.quick else 30),
    )


def _add_scheduling(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("scheduling", help="what deciding on a step costs the host")
    add = parser.add_argument
    add("--running", type=whole(1), nargs="+", default=[16, 64, 256, 1024], metavar="N")
    add("--waiting", type=whole(0), nargs="+", default=[0, 10_000], metavar="N")
    add("--quick", action="store_true", help="few rounds: does it run?")
    add_outputs(parser, plot=False)
    parser.set_defaults(run=_scheduling)


def _scheduling(args: argparse.Namespace, command: str) -> Report:
    from roseinfer.bench.serving import scheduling

    rounds = 3 if args.quick else 30
    rows = [
        scheduling.measure(running, waiting, rounds)
        for running in args.running
        for waiting in args.waiting
    ]
    return Report(
        "scheduling",
        command,
        reporting.now(),
        reporting.this_machine(torch.device("cpu")),
        {"rounds": rounds},
        {},
        (Table("scheduling", _SCHEDULING, rows),),
    )


def _add_plot(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plot", help="draw the chart of a report that --json wrote")
    parser.add_argument("report", type=Path)
    parser.add_argument("chart", type=Path, metavar="chart.png")
    parser.set_defaults(run=_plot)


def _plot(args: argparse.Namespace, _command: str) -> None:
    charts.redraw(args.report, args.chart)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, tuple)) else str(value)


def _runnable(device: torch.device) -> tuple[_Policies, _Policies, list[UnavailableRow]]:
    """The writes and the clones that can be timed on ``device``, and why others cannot."""
    switched_off = "" if AppendPolicy.from_env().triton else f"{TRITON_SWITCH} is off"
    reason = why_triton_cannot_be_timed(device) or switched_off
    can_write, can_clone = (
        {path: policy for path, policy in all_of.items() if not (reason and path.needs_triton)}
        for all_of in (append.WRITES, append.CLONES)
    )
    missing = (append.WRITES.keys() | append.CLONES.keys()) - can_write.keys() - can_clone.keys()
    rows = [UnavailableRow(path.value, reason) for path in KVPath if path in missing]
    return can_write, can_clone, rows


def _scaling_tables(*, quick: bool) -> tuple[Table, Table]:
    if quick:
        config = append_scaling.ScalingConfig((64, 256), (1_024, 16_384), (16, 1_024), rounds=3)
    else:
        config = append_scaling.ScalingConfig(
            sequences=(64, 256, 1_024, 4_096),
            blocks=(1_024, 100_000, 1_000_000),
            tokens=(16, 256, 1_024, 4_096, 16_384),
            rounds=15,
        )
    pool = [append_scaling.measure_pool(blocks) for blocks in config.blocks]
    scaling = append_scaling.measure_scaling(config)
    return Table("scaling", _SCALING, scaling), Table("pool", _POOL, pool)


def append_targets(
    config: AppendConfig, writes: Sequence[WriteRow], steps: Sequence[StepRow]
) -> list[TargetRow]:
    """Verdicts, if the run measured what the limits speak of."""
    measured = (config.device.type, config.dtype, config.layers, config.heads, config.head_dim)
    if measured != _LIMITS_SHAPE:
        return []
    step_of = {(step.batch, step.path_that_ran): step for step in steps}
    rows = []
    for write in writes:
        if write.batch != _LIMITS_BATCH or write.path_that_ran not in _LIMITS_PATHS:
            continue
        step = step_of[write.batch, write.path_that_ran]
        numbers = (
            step.plan_us,
            write.host_us,
            write.device_us,
            step.per_layer_speedup,
            step.grouped_speedup,
        )
        rows += judge(write.path_that_ran, dict(zip(_LIMITS, numbers, strict=True)), _LIMITS)
    return rows


if __name__ == "__main__":
    sys.exit(main())
