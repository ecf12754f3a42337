"""Mixture of experts: choosing each row's experts, routing rows, and the experts' GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import cdiv, launch, next_power_of_2
from roseinfer.kernels.traffic import declare_traffic, num_bytes
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.streamed import num_stages, silu_mul, tile_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.traffic import LaunchArguments

_MIN_LOGIT = tl.constexpr(-1e38)
"""Replacement of a logit that is NaN, or below this."""


def _chosen_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the logits of all experts, and the chosen experts with their weights."""
    rows = len(arguments["experts"])
    chosen = {
        name: num_bytes(arguments[name], rows * arguments["MOST"])
        for name in ("experts", "weights")
    }
    return {
        "parts": num_bytes(arguments["parts"], arguments["PARTS"] * rows * arguments["N"]),
        **chosen,
    }


@declare_traffic(_chosen_traffic)
@triton.jit
def _choose_kernel(
    parts, experts, weights, like,
    p_p, p_r,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr,
    MOST: tl.constexpr, TILE_M: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row. ``like`` has the dtype that the modules round to."""
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
    # NaN and infinities: some experts have to be chosen, and no expert twice.
    total = tl.where(inside & (total == total), total, _MIN_LOGIT)
    total = tl.minimum(tl.maximum(total, _MIN_LOGIT), -_MIN_LOGIT)
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


def select_experts(
    parts: Tensor, like: Tensor, most: int, dtype: torch.dtype, *, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Return each row's ``most`` top experts, and their probabilities in that dtype.

    ``parts`` are the logits of all experts, ``[parts, rows, experts]``, still to be added up and
    rounded as ``like`` is. With ``renormalize``, the weights of a row add up to one.
    """
    num_parts, rows, num_experts = parts.shape
    experts = parts.new_empty((rows, most), dtype=torch.int32)
    weights = parts.new_empty((rows, most), dtype=dtype)
    launch(
        _choose_kernel, (rows,), parts, experts, weights, like, *parts.stride()[:2],
        num_experts, next_power_of_2(num_experts), num_parts,
        most, next_power_of_2(most), renormalize, num_warps=1, pdl=True,
    )  # fmt: skip
    return experts, weights


# Expert routing: the rows of each expert, in tiles for one program each.
#
# An assignment of a row to an expert is numbered ``row * most + place``, its place among the
# experts of its row. Few rows need no table: a program searches the experts of all rows for its
# own. The assignments of many rows are sorted by expert.


MAX_ROWS = 64
"""Largest number of rows without tables. With more, few rows of a tile would be its expert's."""
_TILE_R = 64


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """Assignments of rows to experts, cut into tiles of one expert each."""

    experts: Tensor
    """Experts of each row, ``[rows, most]``, no expert twice in a row."""
    order: Tensor
    """Assignments sorted by expert. Not read where rows are few."""
    tiles: Tensor
    """Expert, begin and end of each tile in that order, ``[3, tiles]``; not read where rows are
    few."""
    num_tiles: int
    tile_rows: int
    tile_assignments: int = 0
    """Assignments that each tile searches, with a tile per assignment; 0 with one per expert."""

    @property
    def has_few_rows(self) -> bool:
        return len(self.experts) <= MAX_ROWS


def route_rows(experts: Tensor, num_experts: int) -> ExpertRouting:
    """Cut the assignments of ``[rows, most]`` experts into tiles, without a device sync."""
    rows, most = experts.shape
    if rows <= MAX_ROWS:
        by_visit, tile = rows * most < num_experts, tile_of_rows(rows)
        if by_visit:
            looked_through = next_power_of_2(rows * most)
            return ExpertRouting(experts, experts, experts, rows * most, tile, looked_through)
        return ExpertRouting(experts, experts, experts, num_experts, tile)
    found, order = experts.flatten().sort(stable=True)
    each = torch.arange(num_experts + 1, dtype=found.dtype, device=found.device)
    begins = torch.searchsorted(found, each)
    counts = begins.diff()
    ends_of_tiles = ((counts + _TILE_R - 1) // _TILE_R).cumsum(0)
    num_tiles = rows * most // _TILE_R + min(num_experts, rows * most)
    at = torch.arange(num_tiles, device=found.device)
    of = torch.searchsorted(ends_of_tiles, at, right=True)  # one too many for an empty tile
    first = torch.cat([ends_of_tiles.new_zeros(1), ends_of_tiles])[of]
    begin = begins[of] + (at - first) * _TILE_R
    end = torch.cat([begins[1:], begins[-1:]])[of]
    tiles = torch.stack([of, begin, torch.minimum(begin + _TILE_R, end)])
    return ExpertRouting(experts, order, tiles, num_tiles, _TILE_R)


def count_routed_experts(arguments: LaunchArguments) -> Callable[[], int]:
    """Return a function that counts the experts with rows when a kernel runs."""
    experts = arguments["experts"]
    return lambda: len(experts.unique())


def tables_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the tables that assign rows to experts."""
    visits = arguments["rows"] * arguments["MOST"]
    if arguments["FEW"]:
        return {"experts": num_bytes(arguments["experts"], visits)}
    order, tiles = arguments["order"], arguments["tiles"]
    return {"order": num_bytes(order, visits), "tiles": num_bytes(tiles, tiles.numel())}


@triton.jit
def load_tile_routing(
    experts, order, tiles, tile, rows, num_tiles,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert and assignments, padded with -1; an empty tile has only -1."""
    r = tl.arange(0, TILE_R)
    if FEW:
        expert = tile
        if TILE_V:
            expert = tl.load(experts + tile)
        visits = tl.full((TILE_R,), -1, tl.int32)
        for place in tl.static_range(MOST):
            own = tl.load(experts + r * MOST + place, r < rows, other=-1)
            visits = tl.where(own == expert, r * MOST + place, visits)
        if TILE_V:  # the tile of the first assignment of an expert takes all of them
            v = tl.arange(0, TILE_V)
            before = tl.load(experts + v, v < tile, other=-1)
            visits = tl.where(tl.max((before == expert).to(tl.int32), 0) > 0, -1, visits)
    else:
        expert = tl.load(tiles + tile).to(tl.int32)
        v = tl.load(tiles + num_tiles + tile) + r
        last = tl.load(tiles + 2 * num_tiles + tile)
        visits = tl.load(order + v, v < last, other=-1).to(tl.int32)
    return expert, visits


# GEMMs of an expert's gated MLP, over the rows that are routed to it.
#
# Weights are the first factor of a GEMM, as in other layers of few rows. An expert's weights are
# read once per tile of its rows, and not at all without rows. A row's bits depend on no other row.


_TILE_N = 64
_LARGE_TILE_K = 128
_MIN_ROWS = 16
"""Smallest number of rows of a tile; only so few leave space for large tiles of weights."""


def _traffic(
    arguments: LaunchArguments, rows: int, of_expert: int
) -> dict[str, int | Callable[[], int]]:
    """Count the rows of one side, the weights of the routed experts, and the outputs."""
    count, visits = count_routed_experts(arguments), arguments["rows"] * arguments["MOST"]
    each = num_bytes(arguments["weight"], of_expert)
    return {
        "x": num_bytes(arguments["x"], rows * arguments["K"]),
        "weight": lambda: count() * each,
        "out": num_bytes(arguments["out"], visits * arguments["N"]),
        **tables_traffic(arguments),
    }


def _gated_traffic(arguments: LaunchArguments) -> dict[str, int | Callable[[], int]]:
    return _traffic(arguments, arguments["rows"], 2 * arguments["K"] * arguments["N"])


def _weighed_traffic(arguments: LaunchArguments) -> dict[str, int | Callable[[], int]]:
    visits = arguments["rows"] * arguments["MOST"]
    weights = {"weights": num_bytes(arguments["weights"], visits)}
    return _traffic(arguments, visits, arguments["K"] * arguments["N"]) | weights


@declare_traffic(_gated_traffic)
@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _visit_gated_kernel(
    x, weight, out, experts, order, tiles, rows, num_tiles,
    x_r, w_e, w_n, o_v,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of one expert's rows: gates and gated values."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, visits = load_tile_routing(
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
        tl.store(places, silu_mul(gate, up, out.dtype.element_ty), w_in & x_in)


@declare_traffic(_weighed_traffic)
@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _visit_weighed_kernel(
    x, weight, weights, out, experts, order, tiles, rows, num_tiles,
    x_v, w_e, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of one expert's rows, weighted."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, visits = load_tile_routing(
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


def expert_gate_up(x: Tensor, weight: Tensor, visits: ExpertRouting) -> Tensor:
    """Compute the first half of each routed expert's MLP, ``[assignments, outputs]``.

    ``weight`` is ``[experts, 2 * outputs, inputs]``, gates first.
    """
    outputs, inputs = weight.shape[1] // 2, weight.shape[2]
    out = x.new_empty((visits.experts.numel(), outputs))
    tensors = (x, weight, out)
    strides = (x.stride(0), *weight.stride()[:2], out.stride(0))
    _launch(_visit_gated_kernel, tensors, strides, (outputs, inputs), visits, 2 * _TILE_N)
    return out


def expert_down(x: Tensor, weight: Tensor, weights: Tensor, visits: ExpertRouting) -> Tensor:
    """Compute the second half, ``[most, rows, outputs]`` in float32, still to be added up.

    Results are multiplied by ``weights``, ``[rows, most]``.
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
    visits: ExpertRouting,
    tile_weights: int,
) -> None:
    rows, most = visits.experts.shape
    x, (outputs, inputs) = tensors[0], shape
    tile_k = _LARGE_TILE_K if visits.tile_rows == _MIN_ROWS else _LARGE_TILE_K // 2
    tile_bytes = (tile_weights + visits.tile_rows) * tile_k * x.element_size()
    launch(
        kernel, (cdiv(outputs, _TILE_N), visits.num_tiles),
        *tensors, visits.experts, visits.order, visits.tiles, rows, visits.num_tiles,
        *strides, outputs, inputs, _TILE_N, tile_k, num_stages(tile_bytes, x.get_device()),
        most, visits.tile_rows, visits.has_few_rows, visits.tile_assignments, pdl=True,
    )  # fmt: skip
