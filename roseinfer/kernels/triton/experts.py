"""Choosing which experts each row visits, and how much each of them counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.traffic import moves, taken
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.streamed import gated, num_stages, tile_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.traffic import Given

_LOWEST = tl.constexpr(-1e38)
"""In place of a logit that is not a number, and of all that are below."""


def _chosen_moved(given: Given) -> dict[str, int]:
    """Count the numbers of all experts, and what is told of those that are chosen."""
    rows = len(given["experts"])
    chosen = {name: taken(given[name], rows * given["MOST"]) for name in ("experts", "weights")}
    return {"parts": taken(given["parts"], given["PARTS"] * rows * given["N"]), **chosen}


@moves(_chosen_moved)
@triton.jit
def _choose_kernel(
    parts, experts, weights, like,
    p_p, p_r,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr,
    MOST: tl.constexpr, TILE_M: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes a row. ``like`` has the dtype that the model's own modules round to."""
    row = tl.program_id(0).to(tl.int64)
    n, m = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    inside = n < N
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TILE_N,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * p_p + row * p_r + n, inside, other=0.0)
    total = total.to(like.dtype.element_ty).to(tl.float32)
    # Whatever is no number: some experts have to be chosen, and no expert twice.
    total = tl.where(inside & (total == total), total, _LOWEST)
    total = tl.minimum(tl.maximum(total, _LOWEST), -_LOWEST)
    left = tl.where(inside, tl.exp(total - tl.max(total, 0)), 0.0)
    left = left / tl.sum(left, 0)
    chosen, counts = tl.zeros((TILE_M,), tl.int32), tl.zeros((TILE_M,), tl.float32)
    for at in tl.static_range(MOST):
        best = tl.argmax(left, 0)
        chosen = tl.where(m == at, best, chosen)
        counts = tl.where(m == at, tl.max(left, 0), counts)
        left = tl.where(n == best, -1.0, left)
    if SHARED:
        counts = counts / tl.sum(counts, 0)
    tl.store(experts + row * MOST + m, chosen, m < MOST)
    tl.store(weights + row * MOST + m, counts.to(weights.dtype.element_ty), m < MOST)


def choose_experts(
    parts: Tensor, like: Tensor, most: int, dtype: torch.dtype, *, shared: bool
) -> tuple[Tensor, Tensor]:
    """Return the ``most`` likeliest experts of each row, and how likely they are in that dtype.

    ``parts`` are the logits of all experts, ``[parts, rows, experts]``, still to be added up and
    rounded as ``like`` is. Where they are ``shared``, the weights of a row add up to one.
    """
    num_parts, rows, num_experts = parts.shape
    experts = parts.new_empty((rows, most), dtype=torch.int32)
    weights = parts.new_empty((rows, most), dtype=dtype)
    launch(
        _choose_kernel, (rows,), parts, experts, weights, like, *parts.stride()[:2],
        num_experts, power_of_two(num_experts), num_parts,
        most, power_of_two(most), shared, num_warps=1, early=True,
    )  # fmt: skip
    return experts, weights


# Which rows visit which expert, in tiles of rows that one program can take.
#
# A visit is numbered ``row * most + place``, its place among the experts of its row. Few rows need
# no table: a program looks through the experts of all rows for those that visit its own. Of many
# rows the visits are put in order of their experts.


MOST_ROWS = 64
"""With more, a tile would have rows of which few visit its expert."""
_TILE_R = 64


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of some rows, cut into tiles of visits to one expert each."""

    experts: Tensor
    """``[rows, most]``, no expert twice in a row."""
    order: Tensor
    """All visits, those to one expert next to each other. Not read where rows are few."""
    tiles: Tensor
    """``[3, tiles]``: experts of tiles, and where in that order they begin and end; nor this."""
    num_tiles: int
    tile_rows: int
    tile_visits: int = 0
    """There is a tile for each visit, and so many are looked through; 0 if one for each expert."""

    @property
    def few(self) -> bool:
        return len(self.experts) <= MOST_ROWS


def visits_of(experts: Tensor, num_experts: int) -> Visits:
    """Cut the visits of ``[rows, most]`` experts into tiles, without waiting for the device."""
    rows, most = experts.shape
    if rows <= MOST_ROWS:
        by_visit, tile = rows * most < num_experts, tile_of_rows(rows)
        if by_visit:
            looked_through = power_of_two(rows * most)
            return Visits(experts, experts, experts, rows * most, tile, looked_through)
        return Visits(experts, experts, experts, num_experts, tile)
    found, order = experts.flatten().sort(stable=True)
    each = torch.arange(num_experts + 1, dtype=found.dtype, device=found.device)
    begins = torch.searchsorted(found, each)
    counts = begins.diff()
    ends_of_tiles = ((counts + _TILE_R - 1) // _TILE_R).cumsum(0)
    num_tiles = rows * most // _TILE_R + min(num_experts, rows * most)
    at = torch.arange(num_tiles, device=found.device)
    of = torch.searchsorted(ends_of_tiles, at, right=True)  # one too many where there is no tile
    first = torch.cat([ends_of_tiles.new_zeros(1), ends_of_tiles])[of]
    begin = begins[of] + (at - first) * _TILE_R
    end = torch.cat([begins[1:], begins[-1:]])[of]
    tiles = torch.stack([of, begin, torch.minimum(begin + _TILE_R, end)])
    return Visits(experts, order, tiles, num_tiles, _TILE_R)


def visited(given: Given) -> Callable[[], int]:
    """Return what counts the experts that are visited when a kernel runs."""
    experts = given["experts"]
    return lambda: len(experts.unique())


def tables_moved(given: Given) -> dict[str, int]:
    """Count what says which rows visit which expert."""
    visits = given["rows"] * given["MOST"]
    if given["FEW"]:
        return {"experts": taken(given["experts"], visits)}
    order, tiles = given["order"], given["tiles"]
    return {"order": taken(order, visits), "tiles": taken(tiles, tiles.numel())}


@triton.jit
def visits_of_tile(
    experts, order, tiles, tile, rows, num_tiles,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Return the expert of a tile and its visits, padded with -1; all are where there are none."""
    r = tl.arange(0, TILE_R)
    if FEW:
        expert = tile
        if TILE_V:
            expert = tl.load(experts + tile)
        visits = tl.full((TILE_R,), -1, tl.int32)
        for place in tl.static_range(MOST):
            own = tl.load(experts + r * MOST + place, r < rows, other=-1)
            visits = tl.where(own == expert, r * MOST + place, visits)
        if TILE_V:  # the tile of the first visit to an expert takes all of them
            v = tl.arange(0, TILE_V)
            before = tl.load(experts + v, v < tile, other=-1)
            visits = tl.where(tl.max((before == expert).to(tl.int32), 0) > 0, -1, visits)
    else:
        expert = tl.load(tiles + tile).to(tl.int32)
        v = tl.load(tiles + num_tiles + tile) + r
        last = tl.load(tiles + 2 * num_tiles + tile)
        visits = tl.load(order + v, v < last, other=-1).to(tl.int32)
    return expert, visits


# The products of an expert's gated MLP by the rows that visit it.
#
# Weights are the first factor of a product, as in other layers of few rows. An expert's weights are
# read once for a tile of the rows that visit it, and those of an expert that nobody visits are not.
# A row's bits depend on no other row.


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
