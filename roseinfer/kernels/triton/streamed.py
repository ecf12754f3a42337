"""Linear layers of few rows whose weights stream through shared memory.

Tiles of weights are the first factor of a product, of which tensor cores take 64 rows or more; rows
of inputs are the second, which may have as few as 16. So inputs leave room for many tiles of
weights on their way. A row's bits depend on no other row: how many there are changes neither the
order in which inputs are added up nor the parts they are added up in.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.cuda.streamed import stream, streams
from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.traffic import moves, taken
from roseinfer.kernels.triton.linear import add_after, dot

if TYPE_CHECKING:
    from roseinfer.kernels.traffic import Given

_TILE_N = 64
_TILE_K = 128
_MOST_STAGES = 6
_ROOM = 150 << 10
"""Bytes of tiles on their way in a program. With more, the next kernel's programs find no place."""
_PROGRAMS_WANTED = 128
"""A layer is cut into parts until it has so many: they fill a large GPU."""
_LEAST_SHARE = 4 * _TILE_K
"""Inputs of a part, for with fewer no tile is on its way while another is multiplied."""
_ASKED_FOR = 512
"""Bytes of an output's weights that are on their way before the rows are there."""
_WIDE = 1 << 14
"""From so many outputs on a layer has enough programs, however large each is."""


def _streamed_moved(given: Given) -> dict[str, int]:
    """Count the weights, the rows, and what comes out: once, or for every part."""
    moved = {
        "x": taken(given["x"], given["rows"] * given["K"]),
        "weight": taken(given["weight"], given["K"] * given["N"]),
        "out": taken(given["out"], given["PARTS"] * given["rows"] * given["N"]),
    }
    if given["BIAS"]:
        moved["bias"] = taken(given["bias"], given["N"])
    return moved


@triton.jit
def ask_for(begins):
    """Have the first bytes at each place brought to the L2 cache. Nobody waits for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;", "=r,l",
        [begins.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def may_ask(weight: Tensor, inputs: int) -> bool:
    """Tell if ``ask_for`` can be called of so many inputs of each output."""
    size = weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * size % 16 == 0
    return aligned and inputs * size >= _ASKED_FOR


@moves(_streamed_moved)
@triton.jit(do_not_specialize=["rows"])
def _streamed_kernel(
    x, weight, bias, out, rows,
    x_r, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, ASKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs and a part of the inputs, of some rows."""
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
        if ASKS:
            ask_for(weight + tl.minimum(n, N - 1).to(tl.int64) * w_n + begin)
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

    The inputs of a row and those of an output lie side by side.
    """
    out = x.new_empty((len(x), len(weight)))
    _launch(x, weight, bias, out[None])
    return out


def stream_linear_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` as ``[parts, rows, outputs]`` in float32, still to be added up."""
    outputs, inputs = weight.shape
    out = x.new_empty((num_parts(outputs, inputs), len(x), outputs), dtype=torch.float32)
    _launch(x, weight, None, out)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    outputs, inputs = weight.shape
    parts, rows, _ = out.shape
    if outputs < _WIDE and streams(x, weight, parts, 1):
        stream(x, weight, bias, out, 1)
        return
    tile_r = tile_of_rows(rows)
    tile_n, tile_k = (2 * _TILE_N, _TILE_K // 2) if outputs >= _WIDE else (_TILE_N, _TILE_K)
    last = inputs - (parts - 1) * num_tiles(inputs, parts * tile_k) * tile_k
    stages = num_stages((tile_n + tile_r) * tile_k * x.element_size(), x.get_device())
    launch(
        _streamed_kernel, (num_tiles(outputs, tile_n), parts, num_tiles(rows, tile_r)),
        x, weight, bias, out, rows, x.stride(0), weight.stride(0), *out.stride()[:2],
        outputs, inputs, tile_r, tile_n, tile_k, parts, stages, bias is not None,
        may_ask(weight, last), early=True,
    )  # fmt: skip


@cache
def tile_of_rows(rows: int) -> int:
    return min(64, max(16, power_of_two(rows)))


@cache
def num_parts(outputs: int, inputs: int) -> int:
    """Return the parts of a layer, which no row has a say in: they decide how it is rounded."""
    strips = num_tiles(outputs, _TILE_N)
    wanted = power_of_two(num_tiles(_PROGRAMS_WANTED, strips))
    return max(1, min(wanted, inputs // _LEAST_SHARE))


def cut_evenly(outputs: int, inputs: int) -> bool:
    """Tell if all parts of a layer have as many inputs."""
    return inputs % (num_parts(outputs, inputs) * _TILE_K) == 0


@cache
def num_stages(tile_bytes: int, device: int) -> int:
    """Return how many tiles may be on their way at once, by the shared memory that there is."""
    if device < 0:
        return 1
    device_has: Any = torch.cuda.get_device_properties(device)
    there: int = device_has.shared_memory_per_block_optin
    return max(1, min(_MOST_STAGES, min(_ROOM, there) // tile_bytes))


# The first half of a gated MLP: two products of the same rows, one of which gates the other.


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
