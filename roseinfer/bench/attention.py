"""``attention``: what one layer's attention costs, in decode steps and of prompts, by shape."""

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

from roseinfer.attention.backend import StepBatch
from roseinfer.attention.reference import append_and_attend_reference, paged_attention_reference
from roseinfer.bench.cases import Shape
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import (
    copy_bandwidth,
    in_rounds,
    matrix_operations,
    sampler,
    why_triton_cannot_be_timed,
)
from roseinfer.config import AppendPolicy
from roseinfer.kv.manager import KVBlockManager, StepAppend
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
    from roseinfer.kernels.cuda.decode_attention import attend_rows, attends_rows
    from roseinfer.kernels.triton.decode_attention import append_and_attend, paged_attention_decode

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


# The attention of prompts: several new tokens for every sequence, behind what is stored.


FLASH, TORCH = "torch_flash_attention", "torch_attention"
"""What torch's own attention is called on a GPU, where it must be FlashAttention, and elsewhere."""
_NO_TRITON = AppendPolicy(triton=False)
"""Random numbers fill the cache, and no kernel that would append is missed."""
_SEED = 7


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the machine can do, measured by a large copy and a large product of matrices."""

    bandwidth: float
    """Bytes per second."""
    operations: float
    """Multiplications and additions per second."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    shape: str
    path: str
    us: float
    """Per call: among many in a CUDA graph on a GPU, else until the call is done."""
    tflop_per_s: float
    bound_by: str
    floor_us: float
    times_floor: float


class PrefillRig:
    """Sequences stored in a cache, new tokens included, whose blocks lie scattered."""

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
        """Deal the full blocks out anew; a block that is not full stays the last of its list."""
        full = self.shape.context // self.kv.block_size
        dealt = [block for own in self.lists for block in own[:full]]
        random.Random(_SEED).shuffle(dealt)
        for at, own in enumerate(self.lists):
            own[:full] = dealt[at * full : (at + 1) * full]

    def reference(self, layer: int) -> Tensor:
        counts = [self.shape.new] * self.shape.sequences
        return paged_attention_reference(
            self.kv, layer, self.query, self.lists, counts, self.traits
        )

    def kernel(self) -> tuple[str, Callable[[int], Tensor]]:
        """Return what attends in a layer as the engine's step of prompts does, and its path."""
        from roseinfer.attention.triton import TritonAttention

        shape, kv = self.shape, self.kv
        counts, lengths = ([each] * shape.sequences for each in (shape.new, shape.context))
        lists = [[own] for own in self.lists]
        new = StepAppend(kv, lists, counts, one_each=False)
        batch = StepBatch(new, lists, counts, lengths, singles=0)
        staging = IndexStaging(kv.device, kv.work_counts)
        paths: Counter[str] = Counter()
        backend = TritonAttention([self.traits] * self.layers, kv, staging, paths)
        backend.prepare(batch)
        backend.attend(batch, 0, self.query)
        (path,) = paths
        return path, lambda layer: backend.attend(batch, layer, self.query)

    def torch_attention(self) -> Callable[[int], Tensor]:
        """Return torch's attention of the same keys and values, which it has side by side.

        Its result is ``[sequences, tokens, q_heads, head_dim]``.
        """
        shape = self.shape
        query = self.query.view(shape.sequences, shape.new, shape.q_heads, shape.head_dim)
        stored = [self._gathered(layer) for layer in range(self.layers)]
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

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Read a layer's keys and values, ``[sequences, kv_heads, context, head_dim]``."""
        each = [self.kv.gather_sequence(layer, own) for own in self.lists]
        keys, values = zip(*each, strict=True)
        return torch.stack(keys), torch.stack(values)


def operations(shape: Shape) -> int:
    """Count the operations of the two products for all pairs of a query and a key that it sees."""
    pairs = shape.new * shape.stored + shape.new * (shape.new + 1) // 2
    return 2 * 2 * shape.head_dim * pairs * shape.q_heads * shape.sequences


def floor(shape: Shape, dtype: torch.dtype, speeds: Speeds) -> tuple[float, str]:
    """Return the least microseconds, and whether operations or bytes take them."""
    new_values = shape.sequences * shape.new * shape.q_heads * shape.head_dim
    moved = shape.cache_bytes(dtype) + 2 * new_values * dtype.itemsize  # queries and results too
    least = {
        "operations": operations(shape) / speeds.operations * 1e6,
        "bytes": moved / speeds.bandwidth * 1e6,
    }
    bound_by = max(least, key=least.__getitem__)
    return least[bound_by], bound_by


def time_prefill(
    rig: PrefillRig, rounds: int, speeds: Speeds, *, kernels: bool
) -> tuple[list[PrefillRow], list[tuple[str, str]]]:
    """Time our attention, and torch's where nothing is stored; also say what cannot be timed."""
    shape = rig.shape
    samplers: dict[str, Callable[[], float]] = {}
    reasons = []
    for path, attend in _ways(rig, kernels=kernels).items():
        call = partial(_call, attend, cycle(range(rig.layers)))
        try:
            samplers[path] = sampler(call, rig.layers, rig.kv.device)
        except RuntimeError as error:  # torch has no FlashAttention of some heads
            reasons.append((f"{path} of {shape.text}", str(error)))
    taken = in_rounds(samplers, rounds, shape.text)
    least, bound_by = floor(shape, rig.query.dtype, speeds)
    work = operations(shape)
    rows = [
        PrefillRow(shape.text, path, us, work / us / 1e6, bound_by, least, us / least)
        for path, us in taken.items()
    ]
    return rows, reasons


def _ways(rig: PrefillRig, *, kernels: bool) -> dict[str, Callable[[int], Tensor]]:
    ways: dict[str, Callable[[int], Tensor]] = {}
    if kernels:
        path, attend = rig.kernel()
        ways[path] = attend
    else:
        ways[AttentionPath.REFERENCE] = rig.reference
    if not rig.shape.stored:
        ways[FLASH if rig.kv.device.type == "cuda" else TORCH] = rig.torch_attention()
    return ways


def _call(attend: Callable[[int], Tensor], layers: Iterator[int]) -> Tensor:
    return attend(next(layers))


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
