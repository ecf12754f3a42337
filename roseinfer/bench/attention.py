"""``attention``: the time of one layer's attention, in decode steps and in prefills, by shape."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.attention.reference import append_and_attend_reference, paged_attention_reference
from roseinfer.bench.cases import Shape
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import (
    copy_bandwidth,
    gemm_flops,
    median_over_rounds,
    sampler,
    triton_skip_reason,
)
from roseinfer.config import AppendPolicy
from roseinfer.kv.manager import KVBlockManager, StepBatch
from roseinfer.kv.storage import IndexStaging
from roseinfer.layer_traits import LayerTraits
from roseinfer.models.loading import resolve_device
from roseinfer.paths import AttentionPath

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from torch import Tensor

# The attention of a decode step: one new token for every sequence.


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Time of decode attention by one path."""

    shape: str
    path: str
    us: float
    """Microseconds per call: of many in a CUDA graph on a GPU, else until the call is done."""
    floor_us: float
    floor_ratio: float


class DecodeRig:
    """Sequences of one length in scattered blocks, in enough layers that none stays in L2."""

    def __init__(
        self, shape: Shape, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        query, key, value = (
            torch.rand((shape.sequences, heads, shape.head_dim), device=device, dtype=dtype)
            for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
        )
        self.new = query, key, value
        """Query, key and value of the new tokens."""
        each = -(-shape.context // block_size)
        blocks = shape.sequences * each
        self.tables = torch.randperm(blocks, device=device).view(shape.sequences, each)
        self.stored = torch.full((shape.sequences,), shape.stored, device=device)
        size = (2, shape.layers(dtype, device), blocks, shape.kv_heads, block_size)
        caches = torch.empty((*size, shape.head_dim), device=device, dtype=dtype).uniform_(-1, 1)
        self.layers = list(zip(caches[0], caches[1], strict=True))


def time_decode(
    rig: DecodeRig, rounds: int, bandwidth: float, *, kernels: bool
) -> list[AttentionRow]:
    """Time the kernels, or the reference if ``kernels`` is False."""
    shape, (query, *_) = rig.shape, rig.new
    calls, layers = _calls(rig, kernels=kernels), len(rig.layers)
    samplers = {path: sampler(call, layers, query.device) for path, call in calls.items()}
    floor = shape.cache_bytes(query.dtype) / bandwidth * 1e6
    times = median_over_rounds(samplers, rounds, shape.text)
    return [AttentionRow(shape.text, path, us, floor, us / floor) for path, us in times.items()]


def _calls(rig: DecodeRig, *, kernels: bool) -> dict[AttentionPath, Callable[[], object]]:
    layers = cycle(rig.layers)
    traits = LayerTraits(rig.shape.head_dim**-0.5)

    def fused(kernel: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: kernel(*rig.new, *next(layers), rig.tables, rig.stored, traits)

    if not kernels:
        return {AttentionPath.RESIDENT_REFERENCE: fused(append_and_attend_reference)}
    from roseinfer.kernels.cuda.decode_attention import attend_rows, can_attend_rows
    from roseinfer.kernels.triton.decode_attention import append_and_attend, paged_attention_decode

    lengths = rig.stored + 1
    calls: dict[AttentionPath, Callable[[], object]] = {
        AttentionPath.APPEND_AND_ATTEND: fused(append_and_attend),
        AttentionPath.DECODE_TRITON: lambda: paged_attention_decode(
            rig.new[0], *next(layers), rig.tables, lengths, traits
        ),
    }
    if can_attend_rows(*rig.new, *rig.layers[0], traits):
        calls[AttentionPath.APPEND_AND_ATTEND_CUDA] = fused(attend_rows)
    return calls


# Attention in prefills: several new tokens for every sequence, after the stored ones.


FLASH, TORCH = "torch_flash_attention", "torch_attention"
"""Path names of torch's attention: on a GPU, where it must be FlashAttention, and elsewhere."""
_NO_TRITON = AppendPolicy(triton=False)
"""Append policy without Triton: the cache is filled with random numbers, without appends."""
_SEED = 7


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bandwidth and FLOP/s of the machine, measured by a large copy and a large GEMM."""

    bandwidth: float
    """Bytes per second."""
    operations: float
    """Multiplications and additions per second."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Time of prefill attention by one path."""

    shape: str
    path: str
    us: float
    """Microseconds per call: of many in a CUDA graph on a GPU, else until the call is done."""
    tflop_per_s: float
    bound_by: str
    floor_us: float
    floor_ratio: float


class PrefillRig:
    """Sequences in scattered blocks of a cache, which has their new tokens as well."""

    def __init__(
        self, shape: Shape, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.layers = layers = shape.layers(dtype, device)
        blocks = shape.sequences * -(-shape.context // block_size) + 1
        self.kv = kv = KVBlockManager(
            layers, shape.kv_heads, shape.head_dim, block_size, blocks, device, dtype, _NO_TRITON,
            layers_per_group=layers,
        )  # fmt: skip
        for cache in (kv.keys, kv.values):
            cache.uniform_(-1, 1)
        self.lists: list[list[int]] = [[] for _ in range(shape.sequences)]
        kv.plan_append(0, self.lists, [shape.context] * shape.sequences)
        self._scatter()
        size = (shape.sequences * shape.new, shape.q_heads, shape.head_dim)
        self.query = torch.rand(size, device=device, dtype=dtype)
        self.traits = LayerTraits(shape.head_dim**-0.5)

    def _scatter(self) -> None:
        """Shuffle the full blocks of all sequences; partial blocks stay last in their lists."""
        full = self.shape.context // self.kv.block_size
        blocks = [block for block_list in self.lists for block in block_list[:full]]
        random.Random(_SEED).shuffle(blocks)
        for at, block_list in enumerate(self.lists):
            block_list[:full] = blocks[at * full : (at + 1) * full]

    def reference(self, layer: int) -> Tensor:
        counts = [self.shape.new] * self.shape.sequences
        return paged_attention_reference(
            self.kv, layer, self.query, self.lists, counts, self.traits
        )

    def kernel(self) -> tuple[str, Callable[[int], Tensor]]:
        """Return the path of the engine's prefill attention, and the function for one layer."""
        from roseinfer.attention.triton import TritonAttention

        shape, kv = self.shape, self.kv
        counts, lengths = ([each] * shape.sequences for each in (shape.new, shape.context))
        lists = [[block_list] for block_list in self.lists]
        batch = StepBatch(kv, lists, counts, lengths, num_decodes=0)
        staging = IndexStaging(kv.device, kv.work_counts)
        paths: Counter[str] = Counter()
        backend = TritonAttention([self.traits] * self.layers, kv, staging, paths)
        backend.prepare(batch)
        backend.attend(batch, 0, self.query)
        (path,) = paths
        return path, lambda layer: backend.attend(batch, layer, self.query)

    def torch_attention(self) -> Callable[[int], Tensor]:
        """Return torch's attention over the same keys and values, gathered contiguously.

        Its result is ``[sequences, tokens, q_heads, head_dim]``.
        """
        shape = self.shape
        query = self.query.view(shape.sequences, shape.new, shape.q_heads, shape.head_dim)
        stored = [self._gather_layer(layer) for layer in range(self.layers)]
        grouped = shape.q_heads != shape.kv_heads

        def attend(layer: int) -> Tensor:
            out = scaled_dot_product_attention(
                query.transpose(1, 2), *stored[layer], is_causal=True, enable_gqa=grouped
            )
            return out.transpose(1, 2)

        def by_flash_attention(layer: int) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return attend(layer)

        return by_flash_attention if self.kv.device.type == "cuda" else attend

    def _gather_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gather a layer's keys and values, ``[sequences, kv_heads, context, head_dim]``."""
        each = [self.kv.gather_sequence(layer, block_list) for block_list in self.lists]
        keys, values = zip(*each, strict=True)
        return torch.stack(keys), torch.stack(values)


def operations(shape: Shape) -> int:
    """Count the operations of both GEMMs, for all pairs of a query and a key that it attends to."""
    pairs = shape.new * shape.stored + shape.new * (shape.new + 1) // 2
    return 2 * 2 * shape.head_dim * pairs * shape.q_heads * shape.sequences


def floor(shape: Shape, dtype: torch.dtype, speeds: Speeds) -> tuple[float, str]:
    """Return the least microseconds, and their bound: ``operations`` or ``bytes``."""
    new_values = shape.sequences * shape.new * shape.q_heads * shape.head_dim
    traffic = shape.cache_bytes(dtype) + 2 * new_values * dtype.itemsize  # queries and results too
    floor_s = {
        "operations": operations(shape) / speeds.operations * 1e6,
        "bytes": traffic / speeds.bandwidth * 1e6,
    }
    bound_by = max(floor_s, key=floor_s.__getitem__)
    return floor_s[bound_by], bound_by


def time_prefill(
    rig: PrefillRig, rounds: int, speeds: Speeds, *, kernels: bool
) -> tuple[list[PrefillRow], list[tuple[str, str]]]:
    """Time the engine's attention, and torch's if no tokens are stored.

    Also return the paths that cannot be timed, with reasons.
    """
    shape = rig.shape
    samplers: dict[str, Callable[[], float]] = {}
    reasons = []
    for path, attend in _attention_calls(rig, kernels=kernels).items():
        call = partial(_call, attend, cycle(range(rig.layers)))
        try:
            samplers[path] = sampler(call, rig.layers, rig.kv.device)
        except RuntimeError as error:  # torch lacks FlashAttention for some head sizes
            reasons.append((f"{path} of {shape.text}", str(error)))
    times = median_over_rounds(samplers, rounds, shape.text)
    floor_us, bound_by = floor(shape, rig.query.dtype, speeds)
    work = operations(shape)
    rows = [
        PrefillRow(shape.text, path, us, work / us / 1e6, bound_by, floor_us, us / floor_us)
        for path, us in times.items()
    ]
    return rows, reasons


def _attention_calls(rig: PrefillRig, *, kernels: bool) -> dict[str, Callable[[int], Tensor]]:
    calls: dict[str, Callable[[int], Tensor]] = {}
    if kernels:
        path, attend = rig.kernel()
        calls[path] = attend
    else:
        calls[AttentionPath.REFERENCE] = rig.reference
    if not rig.shape.stored:
        calls[FLASH if rig.kv.device.type == "cuda" else TORCH] = rig.torch_attention()
    return calls


def _call(attend: Callable[[int], Tensor], layers: Iterator[int]) -> Tensor:
    return attend(next(layers))


_DECODE = """\
One layer's attention of one new token for each sequence, us per call; append_and_attend and rows
store the token too. A shape is SEQUENCESxCONTEXT:QUERY HEADS/KV HEADSxHEAD SIZE. floor: all keys
and values read once at the measured copy bandwidth. Layers alternate, so that none is in L2."""
_PREFILL = """\
One layer's attention of several new tokens for each sequence, which are already stored, us per
call. A shape is SEQUENCESxSTORED+NEW:QUERY HEADS/KV HEADSxHEAD SIZE. floor: the operations of both
GEMMs, for each new token with itself and all before it, at the measured speed of a large GEMM; or
reading and writing everything once, if that takes longer."""
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
    reason = triton_skip_reason(device)
    speeds = Speeds(copy_bandwidth(device), gemm_flops(device, dtype))
    decode: list[AttentionRow] = []
    prefill: list[PrefillRow] = []
    unavailable = [("the kernels", reason)] if reason else []
    for shape in args.shapes or map(Shape.read, _SHAPES[device.type]):
        if shape.new == 1:
            rig = DecodeRig(shape, args.block_size, device, dtype)
            decode += time_decode(rig, args.rounds, speeds.bandwidth, kernels=not reason)
        else:
            prompts = PrefillRig(shape, args.block_size, device, dtype)
            rows, skipped = time_prefill(prompts, args.rounds, speeds, kernels=not reason)
            prefill += rows
            unavailable += skipped
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
