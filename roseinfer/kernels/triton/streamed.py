"""Linear layers of few rows whose weights stream through shared memory.

Tiles of weights are the first factor of a GEMM, of which tensor cores take 64 rows or more; rows of
inputs are the second, which may have as few as 16. So inputs leave space for many tiles of weights
in flight. A row's bits depend on no other row: the number of rows changes neither the order in
which inputs are added up nor their split into parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.cuda.streamed import can_stream_gemm, stream_gemm
from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import cdiv, next_power_of_2
from roseinfer.kernels.triton.linear import BIASED_GEMM_TRAFFIC, GEMM_TRAFFIC, add_after, dot

_TILE_N = 64
_TILE_K = 128
_MAX_STAGES = 6
_MAX_TILE_BYTES = 150 << 10
"""Bytes of tiles in flight per program. With more, the next kernel's programs find no space."""
_TARGET_PROGRAMS = 128
"""Programs up to which the inputs of a layer are split: they fill a large GPU."""
_MIN_SPLIT_INPUTS = 4 * _TILE_K
"""Smallest number of inputs of a part.

With fewer no tile is in flight while another is multiplied.
"""
_PREFETCH_BYTES = 512
"""Bytes of an output's weights that are prefetched before the rows are ready."""
_MANY_OUTPUTS = 1 << 14
"""Outputs with which a layer has enough programs, however large each is."""


@triton.jit
def prefetch_l2(begins):
    """Prefetch the first bytes at each address into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;", "=r,l",
        [begins.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def can_prefetch(weight: Tensor, inputs: int) -> bool:
    """Return True if ``prefetch_l2`` can be called for ``inputs`` inputs of each output."""
    size = weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * size % 16 == 0
    return aligned and inputs * size >= _PREFETCH_BYTES


@kernel(BIASED_GEMM_TRAFFIC, do_not_specialize=["rows"])
def _streamed_kernel(
    x, weight, bias, out, rows,
    x_r, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, PREFETCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of a part of the inputs, of some rows."""
    r = (tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(1)
    TILES: tl.constexpr = (K + PARTS * TILE_K - 1) // (PARTS * TILE_K)
    begin = part * TILES * TILE_K
    w_rows = weight + n.to(tl.int64)[:, None] * w_n
    x_rows = x + r[None, :] * x_r
    w_in, x_in = (n < N)[:, None], (r < rows)[None, :]
    if BIAS:
        b = tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    if EARLY:
        if PREFETCHES:
            prefetch_l2(weight + tl.minimum(n, N - 1).to(tl.int64) * w_n + begin)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TILE_N, TILE_R), tl.float32)
    for at in tl.range(0, TILES * TILE_K, TILE_K, num_stages=STAGES):
        k = begin + at + tl.arange(0, TILE_K)
        w_tile, x_tile = w_in, x_in
        if K % (PARTS * TILE_K):
            w_tile, x_tile = w_in & (k < K)[None, :], x_in & (k < K)[:, None]
        w = tl.load(w_rows + k[None, :], w_tile, other=0.0)
        a = tl.load(x_rows + k[:, None], x_tile, other=0.0)
        total = dot(w, a, total)
    if BIAS:
        total = add_after(total, b[:, None])
    tl.store(
        out + part * o_p + r[None, :] * o_r + n[:, None],
        total.to(out.dtype.element_ty), w_in & x_in,
    )  # fmt: skip


def stream_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``, ``[rows, inputs]`` by ``[outputs, inputs]``.

    The inputs of a row and those of an output are contiguous.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]))
    _launch(x, weight, bias, out[None])
    return out


def stream_linear_split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` as ``[parts, rows, outputs]`` in float32, still to be added up."""
    outputs, inputs = weight.shape
    out = x.new_empty((num_k_splits(outputs, inputs), x.shape[0], outputs), dtype=torch.float32)
    _launch(x, weight, None, out)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    outputs, inputs = weight.shape
    parts, rows, _ = out.shape
    if outputs < _MANY_OUTPUTS and can_stream_gemm(x, weight, parts, 1):
        stream_gemm(x, weight, bias, out, 1)
        return
    tile_r = tile_of_rows(rows)
    tile_n, tile_k = (2 * _TILE_N, _TILE_K // 2) if outputs >= _MANY_OUTPUTS else (_TILE_N, _TILE_K)
    last = inputs - (parts - 1) * cdiv(inputs, parts * tile_k) * tile_k
    stages = num_stages((tile_n + tile_r) * tile_k * x.element_size(), x.get_device())
    _streamed_kernel.launch(
        (cdiv(outputs, tile_n), parts, cdiv(rows, tile_r)),
        x=x, weight=weight, bias=bias, out=out, rows=rows,
        x_r=x.stride(0), w_n=weight.stride(0), **strides("o_pr", out.stride()),
        N=outputs, K=inputs, TILE_R=tile_r, TILE_N=tile_n, TILE_K=tile_k, PARTS=parts,
        STAGES=stages, BIAS=bias is not None, PREFETCHES=can_prefetch(weight, last),
    )  # fmt: skip


@cache
def tile_of_rows(rows: int) -> int:
    return min(64, max(16, next_power_of_2(rows)))


@cache
def num_k_splits(outputs: int, inputs: int) -> int:
    """Return the parts of a layer, which fix its rounding: they do not depend on the rows."""
    strips = cdiv(outputs, _TILE_N)
    wanted = next_power_of_2(cdiv(_TARGET_PROGRAMS, strips))
    return max(1, min(wanted, inputs // _MIN_SPLIT_INPUTS))


def splits_evenly(outputs: int, inputs: int) -> bool:
    """Return True if all parts of a layer have as many inputs."""
    return inputs % (num_k_splits(outputs, inputs) * _TILE_K) == 0


@cache
def num_stages(tile_bytes: int, device: int) -> int:
    """Return the tiles that may be in flight at once, by the device's shared memory."""
    if device < 0:
        return 1
    device_has: Any = torch.cuda.get_device_properties(device)
    there: int = device_has.shared_memory_per_block_optin
    return max(1, min(_MAX_STAGES, min(_MAX_TILE_BYTES, there) // tile_bytes))


# The first half of a gated MLP: GEMMs of gates and of gated values, of the same rows.


_LARGE_TILE_K = 128
_MIN_ROWS = 16
"""Smallest number of rows of a tile; only so few leave space for large tiles of weights."""
_TILE = 1024


GATED_GEMM_TRAFFIC = {**GEMM_TRAFFIC, "weight": lambda K, N: 2 * K * N}
"""Traffic of a GEMM of gates and one of gated values, of the same rows."""


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Compute ``silu(gate) * up``, rounded where the model's own modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


@kernel(GATED_GEMM_TRAFFIC, do_not_specialize=["rows"])
def _gated_kernel(
    x, weight, out, rows,
    x_r, w_n, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    PREFETCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of some rows, as ``_streamed_kernel`` does."""
    r = (tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    gates = weight + n[:, None] * w_n
    ups = gates + tl.cast(N, tl.int64) * w_n
    x_rows = x + r[None, :] * x_r
    w_in, x_in = (n < N)[:, None], (r < rows)[None, :]
    if EARLY:
        if PREFETCHES:
            begins = weight + tl.minimum(n, N - 1) * w_n
            prefetch_l2(begins)
            prefetch_l2(begins + tl.cast(N, tl.int64) * w_n)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros((TILE_N, TILE_R), tl.float32)
    up = tl.zeros((TILE_N, TILE_R), tl.float32)
    for at in tl.range(0, K, TILE_K, num_stages=STAGES):
        k = at + tl.arange(0, TILE_K)
        w_tile, x_tile = w_in, x_in
        if K % TILE_K:
            w_tile, x_tile = w_in & (k < K)[None, :], x_in & (k < K)[:, None]
        a = tl.load(x_rows + k[:, None], x_tile, other=0.0)
        gate = dot(tl.load(gates + k[None, :], w_tile, other=0.0), a, gate)
        up = dot(tl.load(ups + k[None, :], w_tile, other=0.0), a, up)
    tl.store(
        out + r[None, :] * o_r + n[:, None], silu_mul(gate, up, out.dtype.element_ty), w_in & x_in
    )  # fmt: skip


@kernel({"both": numel, "out": numel})
def _multiply_kernel(both, out, b_r, o_r, N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows may exceed the limit of another axis
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(both + row * b_r + n, n < N, other=0.0)
    up = tl.load(both + row * b_r + N + n, n < N, other=0.0)
    tl.store(out + row * o_r + n, silu_mul(gate, up, out.dtype.element_ty), n < N)


def stream_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``silu(x @ gates.T) * (x @ ups.T)`` for a few rows.

    ``weight`` is ``[2 * outputs, inputs]``, gates first.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2
    out = x.new_empty((rows, outputs))
    if can_stream_gemm(x, weight, 1, 2):
        stream_gemm(x, weight, None, out[None], 2)
        return out
    tile_r = tile_of_rows(rows)
    tile_k = _LARGE_TILE_K if tile_r == _MIN_ROWS else _LARGE_TILE_K // 2
    stages = num_stages((2 * _TILE_N + tile_r) * tile_k * x.element_size(), x.get_device())
    _gated_kernel.launch(
        (cdiv(outputs, _TILE_N), cdiv(rows, tile_r)),
        x=x, weight=weight, out=out, rows=rows,
        x_r=x.stride(0), w_n=weight.stride(0), o_r=out.stride(0),
        N=outputs, K=inputs, TILE_R=tile_r, TILE_N=_TILE_N, TILE_K=tile_k,
        STAGES=stages, PREFETCHES=can_prefetch(weight, inputs),
    )  # fmt: skip
    return out


def silu_and_mul(both: Tensor) -> Tensor:
    """Compute ``silu(gates) * ups`` of ``[rows, 2 * outputs]``, gates first."""
    rows, outputs = both.shape[0], both.shape[1] // 2
    out = both.new_empty((rows, outputs))
    _multiply_kernel.launch(
        (rows, cdiv(outputs, _TILE)),
        both=both, out=out, b_r=both.stride(0), o_r=out.stride(0), N=outputs, TILE=_TILE,
    )  # fmt: skip
    return out
