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

from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.products.dot import add_after, dot
from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.warpgroups.streamed_products import stream, streams

if TYPE_CHECKING:
    from roseinfer.kernels.moves import Given

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
