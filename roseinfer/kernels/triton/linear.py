"""Linear layers of few rows, whose cost is that of reading their weights.

Weights depend on no other kernel. Where the GPU allows it, a kernel starts while the previous one
ends, and is fetching its first weights when the rows are ready.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.cuda.streamed import can_stream_gemm, stream_gemm
from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import cdiv, is_interpreted, next_power_of_2

if TYPE_CHECKING:
    from roseinfer.kernels.kernel import TrafficTable

# GEMMs of tiles, as exact as the device allows.
#
# Triton's interpreter would multiply the bits of a stored bfloat16. There the factors are widened
# first, which changes no product that float32 can represent.


_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total=None):
    """Compute ``a @ b`` in float32, added to ``total`` if that is passed."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def add_after(product, added):
    """Add to a finished product, with the same rounding for any tile size.

    Where one tile holds all inputs, Triton's compiler would turn ``product + added`` into a product
    whose accumulator starts at ``added``, which rounds differently.
    """
    return tl.fma(product, 1.0, added)


_TILE_K = 128
_TILE_N = 64
_TILE = 1024
_MAX_TILE_R = 64
_TARGET_PROGRAMS = 96
"""Programs up to which the inputs of a layer are split: they fill most of a large GPU."""
_MANY_OUTPUTS = 1 << 14
"""Outputs with which a layer has enough programs, however large each is."""


GEMM_TRAFFIC: TrafficTable = {
    "x": lambda rows, K: rows * K,
    "weight": lambda K, N: K * N,
    "out": lambda rows, N, PARTS=1: PARTS * rows * N,
}
"""Traffic of a GEMM that reads its rows and weights once, and writes all its parts."""
BIASED_GEMM_TRAFFIC: TrafficTable = {**GEMM_TRAFFIC, "bias": lambda N, BIAS: N * BIAS}


@triton.jit
def _gelu(x):
    # tanh by the logistic function, which is fast; beyond 10 both are flat
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    inner = tl.minimum(tl.maximum(inner, -10.0), 10.0)
    return x * tl.sigmoid(2.0 * inner)


@kernel({"x": numel, "out": numel})
def _gelu_kernel(x, out, x_r, o_r, N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows may exceed the limit of another axis
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(x + row * x_r + n, n < N, other=0.0).to(tl.float32)
    tl.store(out + row * o_r + n, _gelu(total).to(out.dtype.element_ty), n < N)


@kernel(BIASED_GEMM_TRAFFIC, do_not_specialize=["rows"])
def _whole_kernel(
    x, weight, bias, out, rows,
    x_r, w_k, w_n, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of some rows."""
    r = (tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    columns = weight + n.to(tl.int64)[None, :] * w_n
    if BIAS:
        b = tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TILE_R, TILE_N), tl.float32)
    for at in tl.range(0, K, TILE_K, num_stages=STAGES):
        k = at + tl.arange(0, TILE_K)
        w_in, x_in = (n < N)[None, :], (r < rows)[:, None]
        if K % TILE_K:
            w_in, x_in = w_in & (k < K)[:, None], x_in & (k < K)[None, :]
        w = tl.load(columns + k[:, None] * w_k, w_in, other=0.0)
        a = tl.load(x + r[:, None] * x_r + k[None, :], x_in, other=0.0)
        total = dot(a, w, total)
    if BIAS:
        total = add_after(total, b[None, :])
    if GELU:
        total = _gelu(total.to(out.dtype.element_ty).to(tl.float32))
    tl.store(
        out + r[:, None] * o_r + n[None, :],
        total.to(out.dtype.element_ty), (r < rows)[:, None] & (n < N)[None, :],
    )  # fmt: skip


@kernel(GEMM_TRAFFIC, do_not_specialize=["rows"])
def _parts_kernel(
    x, weight, out, rows,
    x_r, w_k, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of a part of the inputs, of up to four tiles.

    All weights are loaded before waiting for the rows.
    """
    r = (tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(1)
    TILES: tl.constexpr = (K + PARTS * TILE_K - 1) // (PARTS * TILE_K)
    k = part * TILES * TILE_K + tl.arange(0, TILE_K)
    EVEN: tl.constexpr = K % (PARTS * TILE_K) == 0
    w_at = weight + n.to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    w_in = (n < N)[None, :]
    x_at = x + r[:, None] * x_r + k[None, :]
    x_in = (r < rows)[:, None]
    held = ()
    for tile in tl.static_range(TILES):
        w_tile = w_in if EVEN else w_in & (k + tile * TILE_K < K)[:, None]
        held = held + (tl.load(w_at + tile * TILE_K * w_k, w_tile, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TILE_R, TILE_N), tl.float32)
    for tile in tl.static_range(TILES):
        x_tile = x_in if EVEN else x_in & (k + tile * TILE_K < K)[None, :]
        a = tl.load(x_at + tile * TILE_K, x_tile, other=0.0)
        total = dot(a, held[tile], total)
    tl.store(
        out + part * o_p + r[:, None] * o_r + n[None, :], total, x_in & (n < N)[None, :]
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False) -> Tensor:
    """Compute ``x @ weight + bias``, ``[rows, inputs]`` by ``[inputs, outputs]`` of any strides."""
    rows, inputs = x.shape
    outputs = weight.shape[1]
    tile_r = tile_of_rows(rows)
    tile_n, tile_k, warps, stages = _linear_tiles(rows, outputs)
    out = x.new_empty((rows, outputs))
    _whole_kernel.launch(
        (cdiv(outputs, tile_n), cdiv(rows, tile_r)), num_warps=warps,
        x=x, weight=weight, bias=bias, out=out, rows=rows,
        x_r=x.stride(0), **strides("w_kn", weight.stride()), o_r=out.stride(0),
        N=outputs, K=inputs, TILE_R=tile_r, TILE_N=tile_n, TILE_K=tile_k, STAGES=stages,
        BIAS=bias is not None, GELU=gelu,
    )  # fmt: skip
    return out


def gelu(x: Tensor) -> Tensor:
    """Activate ``[rows, width]`` as ``linear`` does its outputs."""
    rows, width = x.shape
    out = torch.empty_like(x)
    _gelu_kernel.launch(
        (rows, cdiv(width, _TILE)),
        x=x, out=out, x_r=x.stride(0), o_r=out.stride(0), N=width, TILE=_TILE,
    )  # fmt: skip
    return out


def num_k_splits(inputs: int, outputs: int, rows: int) -> int:
    """Return the fewest parts, of one to four tiles each, that give enough programs."""
    strips = cdiv(outputs, _TILE_N) * cdiv(rows, tile_of_rows(rows))
    tiles = cdiv(inputs, _TILE_K)
    each = cdiv(tiles, cdiv(_TARGET_PROGRAMS, strips))
    return cdiv(tiles, min(each, 4))


def splits_evenly(inputs: int, parts: int) -> bool:
    """Return True if all parts have as many inputs."""
    return inputs % (parts * _TILE_K) == 0


def split_k_linear(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Compute ``x @ weight`` as ``[parts, rows, outputs]`` in float32, still to be added up.

    There are at least ``num_k_splits`` parts.
    """
    rows, inputs = x.shape
    outputs = weight.shape[1]
    tile_r, tile_n = tile_of_rows(rows), _TILE_N
    out = x.new_empty((parts, rows, outputs), dtype=torch.float32)
    if can_stream_gemm(x, weight.T, parts, 1):
        stream_gemm(x, weight.T, None, out, 1)
        return out
    _parts_kernel.launch(
        (cdiv(outputs, tile_n), parts, cdiv(rows, tile_r)),
        x=x, weight=weight, out=out, rows=rows,
        x_r=x.stride(0), **strides("w_kn", weight.stride()), **strides("o_pr", out.stride()),
        N=outputs, K=inputs, TILE_R=tile_r, TILE_N=tile_n, TILE_K=_TILE_K, PARTS=parts,
    )  # fmt: skip
    return out


@cache
def tile_of_rows(rows: int) -> int:
    return min(_MAX_TILE_R, max(16, next_power_of_2(rows)))


@cache
def _linear_tiles(rows: int, outputs: int) -> tuple[int, int, int, int]:
    """Choose outputs and inputs of a tile, warps and stages: the fastest tried on an H200."""
    if outputs >= _MANY_OUTPUTS:
        return 64, 64, 4, 4
    return (32, 64, 4, 6) if rows <= _MAX_TILE_R else (64, 128, 4, 3)


# GEMMs of so many rows that torch's are faster, split into the same parts as ours.


def split_k_matmul(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Compute ``x @ weight``, ``[rows, inputs]`` by ``[inputs, outputs]``, still to be added up.

    This returns ``[parts, rows, outputs]`` in float32. Where our kernels split the inputs into as
    many parts of the same size, every part has the same bits: a part is one GEMM of a batch, whose
    inputs torch adds up from the first to the last.
    """
    rows = x.view(len(x), parts, -1).transpose(0, 1)
    shares = weight.view(parts, -1, weight.shape[1])
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.bmm(rows, shares, out_dtype=torch.float32)
    return torch.bmm(rows.float(), shares.float())  # torch has no such GEMM otherwise
