"""The first half of a gated MLP: two products of the same rows, one of which gates the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.products.dot import dot
from roseinfer.kernels.products.streamed import ask_for, may_ask, num_stages, tile_of_rows
from roseinfer.kernels.runtime import launch, num_tiles
from roseinfer.kernels.warpgroups.streamed_products import stream, streams

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.moves import Given

_TILE_N = 64
_LARGE_TILE_K = 128
_FEWEST_ROWS = 16
"""A tile has no fewer; only so few leave room for large tiles of weights."""
_TILE = 1024


def _gated_moved(given: Given) -> dict[str, int]:
    """Count the rows, the weights of gates and of what they gate, and what comes out."""
    return {
        "x": taken(given["x"], given["rows"] * given["K"]),
        "weight": taken(given["weight"], 2 * given["K"] * given["N"]),
        "out": taken(given["out"], given["rows"] * given["N"]),
    }


def _multiplied_moved(given: Given) -> dict[str, int]:
    return {name: taken(given[name], given[name].numel()) for name in ("both", "out")}


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """``silu(gate) * up``, rounded where the model's own modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype)


@moves(_gated_moved)
@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x, weight, out, rows,
    x_r, w_n, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    ASKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs of some rows, as ``_streamed_kernel`` does."""
    r = (tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    gates = weight + n[:, None] * w_n
    ups = gates + tl.cast(N, tl.int64) * w_n
    x_rows = x + r[None, :] * x_r
    w_in, x_in = (n < N)[:, None], (r < rows)[None, :]
    if EARLY:
        if ASKS:
            asked = weight + tl.minimum(n, N - 1) * w_n
            ask_for(asked)
            ask_for(asked + tl.cast(N, tl.int64) * w_n)
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
        out + r[None, :] * o_r + n[:, None], gated(gate, up, out.dtype.element_ty), w_in & x_in
    )  # fmt: skip


@moves(_multiplied_moved)
@triton.jit
def _multiply_kernel(both, out, b_r, o_r, N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of rows there can be more than another axis counts
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(both + row * b_r + n, n < N, other=0.0)
    up = tl.load(both + row * b_r + N + n, n < N, other=0.0)
    tl.store(out + row * o_r + n, gated(gate, up, out.dtype.element_ty), n < N)


def linear_gated(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``silu(x @ gates.T) * (x @ ups.T)`` for a few rows.

    ``weight`` is ``[2 * outputs, inputs]``, gates in front of what they gate.
    """
    rows, inputs = x.shape
    outputs = len(weight) // 2
    out = x.new_empty((rows, outputs))
    if streams(x, weight, 1, 2):
        stream(x, weight, None, out[None], 2)
        return out
    tile_r = tile_of_rows(rows)
    tile_k = _LARGE_TILE_K if tile_r == _FEWEST_ROWS else _LARGE_TILE_K // 2
    stages = num_stages((2 * _TILE_N + tile_r) * tile_k * x.element_size(), x.get_device())
    launch(
        _gated_kernel, (num_tiles(outputs, _TILE_N), num_tiles(rows, tile_r)),
        x, weight, out, rows, x.stride(0), weight.stride(0), out.stride(0),
        outputs, inputs, tile_r, _TILE_N, tile_k, stages, may_ask(weight, inputs), early=True,
    )  # fmt: skip
    return out


def multiply_gated(both: Tensor) -> Tensor:
    """Compute ``silu(gates) * ups`` of ``[rows, 2 * outputs]``, gates in front."""
    rows, outputs = both.shape[0], both.shape[1] // 2
    out = both.new_empty((rows, outputs))
    launch(
        _multiply_kernel, (rows, num_tiles(outputs, _TILE)), both, out,
        both.stride(0), out.stride(0), outputs, _TILE, early=True,
    )  # fmt: skip
    return out
