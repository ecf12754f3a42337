"""``attention``: what one layer's attention costs, in decode steps and of prompts, by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.bench.attention.attention_shape import Shape
from roseinfer.bench.attention.decode_attention import AttentionRow, Rig, time_decode
from roseinfer.bench.attention.prefill_attention import (
    PrefillRig,
    PrefillRow,
    Speeds,
    time_prefill,
)
from roseinfer.bench.reporting import Report, Table, unavailable_table
from roseinfer.bench.timing import copy_bandwidth, matrix_operations, why_triton_cannot_be_timed
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    import argparse

_DECODE = """\
One layer's attention of one new token for each sequence, us per call; append_and_attend and rows
store the token too. A shape is SEQUENCESxCONTEXT:QUERY HEADS/KV HEADSxHEAD SIZE. floor: all keys
and values read once at the measured copy bandwidth. Caches take turns, so that none is in L2."""
_PREFILL = """\
One layer's attention of several new tokens for each sequence, which are stored already, us per
call. A shape is SEQUENCESxSTORED+NEW:QUERY HEADS/KV HEADSxHEAD SIZE. floor: the operations of both
products, for each new token with itself and all before it, at the measured speed of a large
product; or reading and writing everything once, where that takes longer."""
_SHAPES = {
    "cuda": (
        "64x256:12/12x64",
        "64x1024:12/12x64",
        "128x128:12/12x64",
        "16x256:12/12x64",
        "64x1024:32/8x128",
        "256x2048:32/8x128",
        "64x0+1024:32/8x128",
        "1x0+8192:32/8x128",
        "8x0+2048:32/8x128",
        "64x0+1024:12/12x64",
        "1x0+8192:12/12x64",
        "8x0+2048:12/12x64",
    ),
    "cpu": ("4x256:12/12x64", "4x256:32/8x128", "2x0+128:12/12x64", "1x128+64:32/8x128"),
}
_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def run(args: argparse.Namespace) -> Report:
    device = resolve_device(args.device)
    dtype = _DTYPES[device.type]
    reason = why_triton_cannot_be_timed(device)
    speeds = Speeds(copy_bandwidth(device), matrix_operations(device, dtype))
    decode: list[AttentionRow] = []
    prefill: list[PrefillRow] = []
    unavailable = [("the kernels", reason)] if reason else []
    for shape in args.shapes or map(Shape.read, _SHAPES[device.type]):
        if shape.new == 1:
            rig = Rig(shape, args.block_size, device, dtype)
            decode += time_decode(rig, args.rounds, speeds.bandwidth, kernels=not reason)
        else:
            prompts = PrefillRig(shape, args.block_size, device, dtype)
            rows, refused = time_prefill(prompts, args.rounds, speeds, kernels=not reason)
            prefill += rows
            unavailable += refused
    return Report(
        "attention",
        args.command,
        device,
        {"block_size": args.block_size, "dtype": str(dtype).removeprefix("torch.")},
        (
            Table("attention", _DECODE, decode),
            Table("prefill", _PREFILL, prefill),
            unavailable_table(unavailable),
        ),
        {
            "copy_bandwidth_gb_per_s": speeds.bandwidth / 1e9,
            "product_tflop_per_s": speeds.operations / 1e12,
        },
    )
