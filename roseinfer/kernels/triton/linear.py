"""Linear layers of few rows, which cost what reading their weights costs.

Weights depend on no other kernel. Where the GPU allows it, a kernel starts while the one in
front of it ends, and is fetching its first weights when the rows are there.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.cuda.streamed import stream, streams
from roseinfer.kernels.runtime import is_interpreted, launch, num_tiles, power_of_two
from roseinfer.kernels.traffic import moves, taken

if TYPE_CHECKING:
    from roseinfer.kernels.traffic import Given

# Products of tiles, as exact as the device makes them.
#
# Triton's interpreter would multiply the bits that a bfloat16 is stored as. There the factors are
# widened first, which changes no product that float32 can hold.


_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total=None):
    """``a @ b``, added to ``total`` where there is one, in float32."""
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
_MOST_TILE_R = 64
_PROGRAMS_WANTED = 96
"""A layer is cut into parts until it has so many: they fill most of a large GPU."""
_WIDE = 1 << 14
"""From so many outputs on a layer has enough programs, however large each is."""


def _layer_moved(given: Given) -> dict[str, int]:
    """Count the weights, the rows, and what comes out: once, or for every part."""
    moved = {
        "x": taken(given["x"], given["rows"] * given["K"]),
        "weight": taken(given["weight"], given["K"] * given["N"]),
        "out": taken(given["out"], given.get("PARTS", 1) * given["rows"] * given["N"]),
    }
    if given.get("BIAS"):
        moved["bias"] = taken(given["bias"], given["N"])
    return moved


def _activated_moved(given: Given) -> dict[str, int]:
    return {name: taken(given[name], given["out"].numel()) for name in ("x", "out")}


@triton.jit
def _gelu(x):
    # tanh by way of the logistic function, which is fast; beyond 10 both are flat
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    inner = tl.minimum(tl.maximum(inner, -10.0), 10.0)
    return x * tl.sigmoid(2.0 * inner)


@moves(_activated_moved)
@triton.jit
def _gelu_kernel(x, out, x_r, o_r, N: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of rows there can be more than another axis counts
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(x + row * x_r + n, n < N, other=0.0).to(tl.float32)
    tl.store(out + row * o_r + n, _gelu(total).to(out.dtype.element_ty), n < N)


@moves(_layer_moved)
@triton.jit
def _whole_kernel(
    x, weight, bias, out, rows,
    x_r, w_k, w_n, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs of some rows."""
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


@moves(_layer_moved)
@triton.jit
def _parts_kernel(
    x, weight, out, rows,
    x_r, w_k, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs and a part of the inputs, of up to four tiles.

    It holds all its weights before it waits for the rows.
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
    tile_n, tile_k, warps, stages = _whole_tiles(rows, outputs)
    out = x.new_empty((rows, outputs))
    launch(
        _whole_kernel, (num_tiles(outputs, tile_n), num_tiles(rows, tile_r)),
        x, weight, bias, out, rows, x.stride(0), *weight.stride(), out.stride(0),
        outputs, inputs, tile_r, tile_n, tile_k, stages, bias is not None, gelu,
        num_warps=warps, early=True,
    )  # fmt: skip
    return out


def gelu(x: Tensor) -> Tensor:
    """Activate ``[rows, width]`` as ``linear`` does its outputs."""
    rows, width = x.shape
    out = torch.empty_like(x)
    launch(
        _gelu_kernel, (rows, num_tiles(width, _TILE)), x, out, x.stride(0), out.stride(0),
        width, _TILE, early=True,
    )  # fmt: skip
    return out


def num_parts(inputs: int, outputs: int, rows: int) -> int:
    """Return the fewest parts, of one to four tiles each, that give enough programs."""
    strips = num_tiles(outputs, _TILE_N) * num_tiles(rows, tile_of_rows(rows))
    tiles = num_tiles(inputs, _TILE_K)
    each = num_tiles(tiles, num_tiles(_PROGRAMS_WANTED, strips))
    return num_tiles(tiles, min(each, 4))


def cut_evenly(inputs: int, parts: int) -> bool:
    """Tell if all parts have as many inputs."""
    return inputs % (parts * _TILE_K) == 0


def linear_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Compute ``x @ weight`` as ``[parts, rows, outputs]`` in float32, still to be added up.

    There are at least ``num_parts`` parts.
    """
    rows, inputs = x.shape
    outputs = weight.shape[1]
    tile_r, tile_n = tile_of_rows(rows), _TILE_N
    out = x.new_empty((parts, rows, outputs), dtype=torch.float32)
    if streams(x, weight.T, parts, 1):
        stream(x, weight.T, None, out, 1)
        return out
    launch(
        _parts_kernel, (num_tiles(outputs, tile_n), parts, num_tiles(rows, tile_r)),
        x, weight, out, rows, x.stride(0), *weight.stride(), *out.stride()[:2],
        outputs, inputs, tile_r, tile_n, _TILE_K, parts, early=True,
    )  # fmt: skip
    return out


@cache
def tile_of_rows(rows: int) -> int:
    return min(_MOST_TILE_R, max(16, power_of_two(rows)))


@cache
def _whole_tiles(rows: int, outputs: int) -> tuple[int, int, int, int]:
    """Choose outputs and inputs of a tile, warps and stages: the fastest tried on an H200."""
    if outputs >= _WIDE:
        return 64, 64, 4, 4
    return (32, 64, 4, 6) if rows <= _MOST_TILE_R else (64, 128, 4, 3)


# Products of so many rows that torch's are faster, in the parts that ours have.


def multiply_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Compute ``x @ weight``, ``[rows, inputs]`` by ``[inputs, outputs]``, still to be added up.

    This returns ``[parts, rows, outputs]`` in float32. Where our kernels cut the inputs into as
    many parts, of the same size, every part has the bits that it has there: a part is one product
    of a batch, whose inputs torch adds up from the first to the last.
    """
    rows = x.view(len(x), parts, -1).transpose(0, 1)
    shares = weight.view(parts, -1, weight.shape[1])
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.bmm(rows, shares, out_dtype=torch.float32)
    return torch.bmm(rows.float(), shares.float())  # torch has no such product of others
