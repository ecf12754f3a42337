"""The attention of a decode step: one new token for every sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.paths import AttentionPath
from roseinfer.attention.reference import append_and_attend_reference
from roseinfer.bench.timing import in_rounds, sampler
from roseinfer.layer_traits import LayerTraits

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.bench.attention.attention_shape import Shape


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
        self.stored = torch.full((shape.sequences,), shape.stored, device=device)
        size = (2, shape.layers(dtype, device), blocks, shape.kv_heads, block_size)
        caches = torch.empty((*size, shape.head_dim), device=device, dtype=dtype).uniform_(-1, 1)
        self.layers = list(zip(caches[0], caches[1], strict=True))


def time_decode(rig: Rig, rounds: int, bandwidth: float, *, kernels: bool) -> list[AttentionRow]:
    """Time the kernels or, without them, the reference."""
    shape, (query, *_) = rig.shape, rig.new
    calls, layers = _calls(rig, kernels=kernels), len(rig.layers)
    samplers = {path: sampler(call, layers, query.device) for path, call in calls.items()}
    floor = shape.cache_bytes(query.dtype) / bandwidth * 1e6
    taken = in_rounds(samplers, rounds, shape.text)
    return [AttentionRow(shape.text, path, us, floor, us / floor) for path, us in taken.items()]


def _calls(rig: Rig, *, kernels: bool) -> dict[AttentionPath, Callable[[], object]]:
    layers = cycle(rig.layers)
    traits = LayerTraits(rig.shape.head_dim**-0.5)

    def fused(kernel: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: kernel(*rig.new, *next(layers), rig.tables, rig.stored, traits)

    if not kernels:
        return {AttentionPath.SLOTS_REFERENCE: fused(append_and_attend_reference)}
    from roseinfer.kernels.attend_decode import append_and_attend, paged_attention_decode
    from roseinfer.kernels.warpgroups.row_attention import attend_rows, attends_rows

    lengths = rig.stored + 1
    calls: dict[AttentionPath, Callable[[], object]] = {
        AttentionPath.APPEND_AND_ATTEND: fused(append_and_attend),
        AttentionPath.DECODE_TRITON: lambda: paged_attention_decode(
            rig.new[0], *next(layers), rig.tables, lengths, traits
        ),
    }
    if attends_rows(*rig.new, *rig.layers[0], traits):
        calls[AttentionPath.ROWS] = fused(attend_rows)
    return calls
