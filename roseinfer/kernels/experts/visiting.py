"""The products of an expert's gated MLP by the rows that visit it.

Weights are the first factor of a product, as in other layers of few rows. An expert's weights are
read once for a tile of the rows that visit it, and those of an expert that nobody visits are not. A
row's bits depend on no other row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.experts.visits import tables_moved, visited, visits_of_tile
from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.products.dot import dot
from roseinfer.kernels.products.gated import gated
from roseinfer.kernels.products.streamed import num_stages
from roseinfer.kernels.runtime import launch, num_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.experts.visits import Visits
    from roseinfer.kernels.moves import Given

_TILE_N = 64
_LARGE_TILE_K = 128
_FEWEST_ROWS = 16
"""A tile has no fewer; only so few leave room for large tiles of weights."""


def _moved(given: Given, rows: int, of_expert: int) -> dict[str, int | Callable[[], int]]:
    """Count the rows of one side, the weights of experts that are visited, and what comes out."""
    count, visits = visited(given), given["rows"] * given["MOST"]
    each = taken(given["weight"], of_expert)
    return {
        "x": taken(given["x"], rows * given["K"]),
        "weight": lambda: count() * each,
        "out": taken(given["out"], visits * given["N"]),
        **tables_moved(given),
    }


def _gated_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    return _moved(given, given["rows"], 2 * given["K"] * given["N"])


def _weighed_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    visits = given["rows"] * given["MOST"]
    weights = {"weights": taken(given["weights"], visits)}
    return _moved(given, visits, given["K"] * given["N"]) | weights


@moves(_gated_moved)
@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _visit_gated_kernel(
    x, weight, out, experts, order, tiles, rows, num_tiles,
    x_r, w_e, w_n, o_v,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs of one expert's visits."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, visits = visits_of_tile(
        experts, order, tiles, tl.program_id(1), rows, num_tiles,
        MOST, TILE_R, FEW, TILE_V,
    )  # fmt: skip
    if tl.max(visits, 0) >= 0:
        w_in, x_in = (n < N)[:, None], (visits >= 0)[None, :]
        gates = weight + expert.to(tl.int64) * w_e + n[:, None] * w_n
        ups = gates + tl.cast(N, tl.int64) * w_n
        x_rows = x + (tl.maximum(visits, 0) // MOST).to(tl.int64)[None, :] * x_r
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
        places = out + tl.maximum(visits, 0).to(tl.int64)[None, :] * o_v + n[:, None]
        tl.store(places, gated(gate, up, out.dtype.element_ty), w_in & x_in)


@moves(_weighed_moved)
@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _visit_weighed_kernel(
    x, weight, weights, out, experts, order, tiles, rows, num_tiles,
    x_v, w_e, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a strip of outputs of one expert's visits."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, visits = visits_of_tile(
        experts, order, tiles, tl.program_id(1), rows, num_tiles,
        MOST, TILE_R, FEW, TILE_V,
    )  # fmt: skip
    if tl.max(visits, 0) >= 0:
        w_in, x_in = (n < N)[:, None], (visits >= 0)[None, :]
        visit = tl.maximum(visits, 0).to(tl.int64)
        w_rows = weight + expert.to(tl.int64) * w_e + n[:, None] * w_n
        x_rows = x + visit[None, :] * x_v
        total = tl.zeros((TILE_N, TILE_R), tl.float32)
        for at in tl.range(0, K, TILE_K, num_stages=STAGES):
            k = at + tl.arange(0, TILE_K)
            w_tile, x_tile = w_in, x_in
            if K % TILE_K:
                w_tile, x_tile = w_in & (k < K)[None, :], x_in & (k < K)[:, None]
            w = tl.load(w_rows + k[None, :], w_tile, other=0.0)
            total = dot(w, tl.load(x_rows + k[:, None], x_tile, other=0.0), total)
        counts = tl.load(weights + visit, visits >= 0, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32) * counts[None, :]
        places = out + (visit % MOST)[None, :] * o_p + (visit // MOST)[None, :] * o_r + n[:, None]
        tl.store(places, total, w_in & x_in)


def visit_gated(x: Tensor, weight: Tensor, visits: Visits) -> Tensor:
    """Compute the first half of each visited expert's MLP, ``[visits, outputs]``.

    ``weight`` is ``[experts, 2 * outputs, inputs]``, gates in front of what they gate.
    """
    outputs, inputs = weight.shape[1] // 2, weight.shape[2]
    out = x.new_empty((visits.experts.numel(), outputs))
    tensors = (x, weight, out)
    strides = (x.stride(0), *weight.stride()[:2], out.stride(0))
    _launch(_visit_gated_kernel, tensors, strides, (outputs, inputs), visits, 2 * _TILE_N)
    return out


def visit_weighed(x: Tensor, weight: Tensor, weights: Tensor, visits: Visits) -> Tensor:
    """Compute the second half, ``[most, rows, outputs]`` in float32, still to be added up.

    Each visit counts as much as ``weights`` say, ``[rows, most]``.
    """
    _, outputs, inputs = weight.shape
    rows, most = visits.experts.shape
    out = x.new_empty((most, rows, outputs), dtype=torch.float32)
    tensors = (x, weight, weights, out)
    strides = (x.stride(0), *weight.stride()[:2], *out.stride()[:2])
    _launch(_visit_weighed_kernel, tensors, strides, (outputs, inputs), visits, _TILE_N)
    return out


def _launch(
    kernel: object,
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    shape: tuple[int, int],
    visits: Visits,
    tile_weights: int,
) -> None:
    rows, most = visits.experts.shape
    x, (outputs, inputs) = tensors[0], shape
    tile_k = _LARGE_TILE_K if visits.tile_rows == _FEWEST_ROWS else _LARGE_TILE_K // 2
    tile_bytes = (tile_weights + visits.tile_rows) * tile_k * x.element_size()
    launch(
        kernel, (num_tiles(outputs, _TILE_N), visits.num_tiles),
        *tensors, visits.experts, visits.order, visits.tiles, rows, visits.num_tiles,
        *strides, outputs, inputs, _TILE_N, tile_k, num_stages(tile_bytes, x.get_device()),
        most, visits.tile_rows, visits.few, visits.tile_visits, early=True,
    )  # fmt: skip
