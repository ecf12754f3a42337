"""The command ``attention``: attending in a decode step, by shape."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from roseinfer.bench import options, reporting
from roseinfer.bench.kernels.attention import Rig, Shape, measure
from roseinfer.bench.kernels.triton_speed import why_triton_cannot_be_timed
from roseinfer.bench.reporting import Report, Table, UnavailableRow
from roseinfer.bench.timing import copy_bandwidth
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    from roseinfer.bench.kernels.attention import AttentionRow

_ROWS = """\
One layer's attention of one new token for each sequence, us per call; append_and_attend stores
the token too. A shape is SEQUENCESxCONTEXT:QUERY HEADS/KV HEADSxHEAD SIZE. floor: all keys and
values read once at the measured copy bandwidth. Caches take turns, so that none is in L2."""
_SHAPES = {
    "cuda": (
        "64x256:12/12x64",
        "64x1024:12/12x64",
        "128x128:12/12x64",
        "16x256:12/12x64",
        "64x1024:32/8x128",
        "256x2048:32/8x128",
    ),
    "cpu": ("4x256:12/12x64", "4x256:32/8x128"),
}
_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("attention", help="what attending in a decode step costs")
    add = parser.add_argument
    add("--shapes", type=_shape, nargs="+", metavar="SHAPE", help="as 64x1024:32/8x128")
    add("--block-size", type=options.whole(1), default=64, help="%(default)s")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--rounds", type=options.whole(1), default=15, help="%(default)s")
    options.add_outputs(parser, plot=False)
    parser.set_defaults(run=_measure)


def _shape(text: str) -> Shape:
    try:
        return Shape.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _measure(args: argparse.Namespace, command: str) -> Report:
    device = resolve_device(args.device)
    dtype = _DTYPES[device.type]
    reason = why_triton_cannot_be_timed(device)
    bandwidth = copy_bandwidth(device, _COPY_BYTES[device.type])
    rows: list[AttentionRow] = []
    for shape in args.shapes or map(Shape.read, _SHAPES[device.type]):
        rig = Rig.of(shape, args.block_size, device, dtype)
        rows += measure(rig, not reason, args.rounds, bandwidth)
    missing = [UnavailableRow("the kernels", reason)] if reason else []
    return Report(
        benchmark="attention",
        command=command,
        date=reporting.now(),
        machine=reporting.this_machine(device),
        config={"block_size": args.block_size, "dtype": str(dtype).removeprefix("torch.")},
        facts={"copy_bandwidth_gb_per_s": bandwidth / 1e9},
        tables=(
            Table("attention", _ROWS, rows),
            Table("unavailable", "Paths that cannot be timed here.", missing),
        ),
    )
