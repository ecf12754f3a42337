"""``attention``: the cost of attending in a decode step, for one layer of some shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath
from roseinfer.attention.reference import append_and_attend_reference
from roseinfer.bench.attention_shape import Shape
from roseinfer.bench.reporting import Report, Table, unavailable_table
from roseinfer.bench.timing import (
    copy_bandwidth,
    graph_sampler,
    in_rounds,
    synchronizer,
    time_calls,
    why_triton_cannot_be_timed,
)
from roseinfer.layer_traits import LayerTraits
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

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
_SPREAD_BYTES = 1 << 30
"""Caches of that many bytes take turns, so that none is still in a GPU's L2 cache."""
_FEWEST_CALLS = 12
_MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class AttentionRow:
    shape: str
    path: str
    us: float
    """Per call: among many in a CUDA graph on a GPU, else until the call is done."""
    floor_us: float
    times_floor: float


class Rig:
    """Sequences of one length whose blocks lie scattered, in enough layers to defeat the L2."""

    def __init__(
        self, shape: Shape, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        query, key, value = (
            torch.rand((shape.sequences, heads, shape.head_dim), device=device, dtype=dtype)
            for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
        )
        self.new = query, key, value
        """What is computed for the new tokens."""
        each = -(-shape.context // block_size)
        blocks = shape.sequences * each
        self.tables = torch.randperm(blocks, device=device).view(shape.sequences, each)
        self.stored = torch.full((shape.sequences,), shape.context - 1, device=device)
        count = -(-_SPREAD_BYTES // shape.cache_bytes(dtype)) if device.type == "cuda" else 1
        size = (2, max(2, min(_MOST_LAYERS, count)), blocks, shape.kv_heads, block_size)
        caches = torch.empty((*size, shape.head_dim), device=device, dtype=dtype).uniform_(-1, 1)
        self.layers = list(zip(caches[0], caches[1], strict=True))


def run(args: argparse.Namespace) -> Report:
    device = resolve_device(args.device)
    dtype = _DTYPES[device.type]
    reason = why_triton_cannot_be_timed(device)
    bandwidth = copy_bandwidth(device)
    rows: list[AttentionRow] = []
    for shape in args.shapes or map(Shape.read, _SHAPES[device.type]):
        rig = Rig(shape, args.block_size, device, dtype)
        calls = _calls(rig, kernels=not reason)
        samplers = {path: _sampler(call, rig) for path, call in calls.items()}
        floor = shape.cache_bytes(dtype) / bandwidth * 1e6
        taken = in_rounds(samplers, args.rounds, shape.text)
        rows += [
            AttentionRow(shape.text, path, us, floor, us / floor) for path, us in taken.items()
        ]
    return Report(
        "attention",
        args.command,
        device,
        {"block_size": args.block_size, "dtype": str(dtype).removeprefix("torch.")},
        (
            Table("attention", _ROWS, rows),
            unavailable_table([("the kernels", reason)] if reason else []),
        ),
        {"copy_bandwidth_gb_per_s": bandwidth / 1e9},
    )


def _sampler(call: Callable[[], object], rig: Rig) -> Callable[[], float]:
    device = rig.stored.device
    sync = synchronizer(device)
    call()  # compiles what there is to compile
    if device.type == "cuda":
        return graph_sampler(call, max(_FEWEST_CALLS, len(rig.layers)), sync)
    return lambda: time_calls(call, 1, sync, wait=True)


def _calls(rig: Rig, *, kernels: bool) -> dict[AttentionPath, Callable[[], object]]:
    layers = cycle(rig.layers)
    traits = LayerTraits(rig.shape.head_dim**-0.5)

    def fused(kernel: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: kernel(*rig.new, *next(layers), rig.tables, rig.stored, traits)

    if not kernels:
        return {AttentionPath.SLOTS_REFERENCE: fused(append_and_attend_reference)}
    from roseinfer.kernels.attend_decode import append_and_attend, paged_attention_decode

    lengths = rig.stored + 1
    return {
        AttentionPath.APPEND_AND_ATTEND: fused(append_and_attend),
        AttentionPath.DECODE_TRITON: lambda: paged_attention_decode(
            rig.new[0], *next(layers), rig.tables, lengths, traits
        ),
    }
