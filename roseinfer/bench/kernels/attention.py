"""``attention``: what attending in a decode step costs, for one layer of some shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath
from roseinfer.attention.reference import append_and_attend_reference
from roseinfer.bench.timing import graph_sampler, in_rounds, synchronizer, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable

_SPREAD_BYTES = 1 << 30
"""Caches of that many bytes take turns, so that none is still in a GPU's L2 cache."""
_FEWEST_CALLS = 12
_MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    sequences: int
    context: int
    """Tokens of each that are attended to, the new one included."""
    q_heads: int
    kv_heads: int
    head_dim: int

    _WRITTEN = re.compile(r"(\d+)x(\d+):(\d+)/(\d+)x(\d+)")

    @classmethod
    def read(cls, text: str) -> Shape:
        """``64x1024:32/8x128``: sequences, context, query heads, KV heads, head size."""
        found = cls._WRITTEN.fullmatch(text)
        numbers = [int(number) for number in found.groups()] if found else [0]
        if min(numbers) < 1:
            raise ValueError(f"{text} is no shape such as 64x1024:32/8x128")
        if numbers[2] % numbers[3]:
            raise ValueError(f"{text}: {numbers[3]} KV heads are no part of {numbers[2]} heads")
        return cls(*numbers)

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.sequences}x{self.context}:{heads}"

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Of the keys and values that must be read."""
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionRow:
    shape: str
    path: str
    us: float
    """Per call: on a GPU of many in a CUDA graph, else until it is done."""
    floor_us: float
    times_floor: float


@dataclass(frozen=True, slots=True)
class Rig:
    """Sequences of one length whose blocks lie scattered, in as many layers as it takes."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    tables: torch.Tensor
    stored: torch.Tensor
    """Without the new token."""

    @classmethod
    def of(cls, shape: Shape, block_size: int, device: torch.device, dtype: torch.dtype) -> Rig:
        each = -(-shape.context // block_size)
        blocks = shape.sequences * each
        count = -(-_SPREAD_BYTES // shape.cache_bytes(dtype)) if device.type == "cuda" else 1
        size = (2, max(2, min(_MOST_LAYERS, count)), blocks, shape.kv_heads, block_size)
        caches = torch.empty((*size, shape.head_dim), device=device, dtype=dtype).uniform_(-1, 1)
        made = {"device": device, "dtype": dtype}
        new = torch.rand((2, shape.sequences, shape.kv_heads, shape.head_dim), **made)  # type: ignore[call-overload]
        return cls(
            shape,
            torch.rand((shape.sequences, shape.q_heads, shape.head_dim), **made),  # type: ignore[call-overload]
            new[0],
            new[1],
            list(zip(caches[0], caches[1], strict=True)),
            torch.randperm(blocks, device=device).view(shape.sequences, each),
            torch.full((shape.sequences,), shape.context - 1, device=device),
        )


def measure(rig: Rig, kernels: bool, rounds: int, bandwidth: float) -> list[AttentionRow]:
    device = rig.query.device
    samplers = {
        path: _sampler(call, max(_FEWEST_CALLS, len(rig.layers)), device)
        for path, call in _calls(rig, kernels=kernels).items()
    }
    floor_us = rig.shape.cache_bytes(rig.query.dtype) / bandwidth * 1e6
    taken = in_rounds(samplers, rounds, str(rig.shape))
    return [
        AttentionRow(str(rig.shape), path.value, us, floor_us, us / floor_us)
        for path, us in ((path, timing.median_us) for path, timing in taken.items())
    ]


def _sampler(call: Callable[[], object], calls: int, device: torch.device) -> Callable[[], float]:
    sync = synchronizer(device)
    call()  # compiles what there is to compile
    if device.type == "cuda":
        return graph_sampler(call, calls, sync)
    return lambda: time_calls(call, 1, sync, wait=True)


def _calls(rig: Rig, *, kernels: bool) -> dict[AttentionPath, Callable[[], object]]:
    layers = cycle(rig.layers)
    scale = rig.shape.head_dim**-0.5

    def fused(kernel: Callable[..., torch.Tensor]) -> Callable[[], object]:
        new = rig.query, rig.key, rig.value
        return lambda: kernel(*new, *next(layers), rig.tables, rig.stored, scale)

    if not kernels:
        return {AttentionPath.SLOTS_REFERENCE: fused(append_and_attend_reference)}
    from roseinfer.kernels.attend_decode import append_and_attend, paged_attention_decode

    lengths = rig.stored + 1
    return {
        AttentionPath.APPEND_AND_ATTEND: fused(append_and_attend),
        AttentionPath.DECODE_TRITON: lambda: paged_attention_decode(
            rig.query, *next(layers), rig.tables, lengths, scale
        ),
    }
