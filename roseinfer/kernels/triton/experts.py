"""Mixture of experts: choosing each row's experts, routing rows, and the experts' GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.kernel import kernel, strides
from roseinfer.kernels.runtime import cdiv, next_power_of_2
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.streamed import num_stages, silu_mul, tile_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.kernel import TrafficTable, TritonKernel

_MIN_LOGIT = tl.constexpr(-1e38)
"""Replacement of a logit that is NaN, or below this."""


_CHOOSE_TRAFFIC: TrafficTable = {
    "parts": lambda experts, PARTS, N: PARTS * len(experts) * N,
    **dict.fromkeys(("experts", "weights"), lambda experts, MOST: len(experts) * MOST),
}


@kernel(_CHOOSE_TRAFFIC)
def _choose_kernel(
    parts, experts, weights, like,
    p_p, p_r,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr,
    MOST: tl.constexpr, TILE_M: tl.constexpr, RENORMALIZE: tl.constexpr, EARLY: tl.constexpr,
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
    if RENORMALIZE:
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
    _choose_kernel.launch(
        (rows,), num_warps=1,
        parts=parts, experts=experts, weights=weights, like=like,
        **strides("p_pr", parts.stride()), PARTS=num_parts,
        N=num_experts, TILE_N=next_power_of_2(num_experts),
        MOST=most, TILE_M=next_power_of_2(most), RENORMALIZE=renormalize,
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
        tile = tile_of_rows(rows)
        if rows * most < num_experts:
            searched = next_power_of_2(rows * most)
            return ExpertRouting(experts, experts, experts, rows * most, tile, searched)
        return ExpertRouting(experts, experts, experts, num_experts, tile)
    ascending, order = experts.flatten().sort(stable=True)
    each = torch.arange(num_experts + 1, dtype=ascending.dtype, device=ascending.device)
    begins = torch.searchsorted(ascending, each)
    counts = begins.diff()
    ends_of_tiles = ((counts + _TILE_R - 1) // _TILE_R).cumsum(0)
    num_tiles = rows * most // _TILE_R + min(num_experts, rows * most)
    at = torch.arange(num_tiles, device=experts.device)
    of = torch.searchsorted(ends_of_tiles, at, right=True)  # one too many for an empty tile
    first = torch.cat([ends_of_tiles.new_zeros(1), ends_of_tiles])[of]
    begin = begins[of] + (at - first) * _TILE_R
    end = torch.cat([begins[1:], begins[-1:]])[of]
    tiles = torch.stack([of, begin, torch.minimum(begin + _TILE_R, end)])
    return ExpertRouting(experts, order, tiles, num_tiles, _TILE_R)


_ROUTING_TRAFFIC: TrafficTable = {
    "experts": lambda rows, MOST, FEW: rows * MOST * FEW,
    "order": lambda rows, MOST, FEW: 0 if FEW else rows * MOST,
    "tiles": lambda own, FEW: 0 if FEW else own.numel(),
}
"""Traffic of the tables that assign rows to experts."""


@triton.jit
def load_tile_routing(
    experts, order, tiles, tile, rows, num_tiles,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_A: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert and assignments, padded with -1; an empty tile has only -1."""
    r = tl.arange(0, TILE_R)
    if FEW:
        expert = tile
        if TILE_A:
            expert = tl.load(experts + tile)
        assignments = tl.full((TILE_R,), -1, tl.int32)
        for place in tl.static_range(MOST):
            own = tl.load(experts + r * MOST + place, r < rows, other=-1)
            assignments = tl.where(own == expert, r * MOST + place, assignments)
        if TILE_A:  # the tile of the first assignment of an expert takes all of them
            a = tl.arange(0, TILE_A)
            before = tl.load(experts + a, a < tile, other=-1)
            assignments = tl.where(tl.max((before == expert).to(tl.int32), 0) > 0, -1, assignments)
    else:
        expert = tl.load(tiles + tile).to(tl.int32)
        a = tl.load(tiles + num_tiles + tile) + r
        last = tl.load(tiles + 2 * num_tiles + tile)
        assignments = tl.load(order + a, a < last, other=-1).to(tl.int32)
    return expert, assignments


# GEMMs of an expert's gated MLP, over the rows that are routed to it.
#
# Weights are the first factor of a GEMM, as in other layers of few rows. An expert's weights are
# read once per tile of its rows, and not at all without rows. A row's bits depend on no other row.


_TILE_N = 64
_LARGE_TILE_K = 128
_MIN_ROWS = 16
"""Smallest number of rows of a tile; only so few leave space for large tiles of weights."""


def _routed(experts: Tensor, of_expert: int) -> Callable[[], int]:
    """Return the elements of the experts that have rows when a kernel runs."""
    return lambda: len(torch.unique(experts)) * of_expert


_GATE_UP_TRAFFIC: TrafficTable = {
    "x": lambda rows, K: rows * K,
    "weight": lambda experts, K, N: _routed(experts, 2 * K * N),
    "out": lambda rows, MOST, N: rows * MOST * N,
    **_ROUTING_TRAFFIC,
}
_DOWN_TRAFFIC: TrafficTable = {
    **_GATE_UP_TRAFFIC,
    "x": lambda rows, MOST, K: rows * MOST * K,
    "weight": lambda experts, K, N: _routed(experts, K * N),
    "weights": lambda rows, MOST: rows * MOST,
}


@kernel(_GATE_UP_TRAFFIC, do_not_specialize=["rows", "num_tiles"])
def _gate_up_kernel(
    x, weight, out, experts, order, tiles, rows, num_tiles,
    x_r, w_e, w_n, o_a,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_A: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of one expert's rows: gates and gated values."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, assignments = load_tile_routing(
        experts, order, tiles, tl.program_id(1), rows, num_tiles,
        MOST, TILE_R, FEW, TILE_A,
    )  # fmt: skip
    if tl.max(assignments, 0) >= 0:
        w_in, x_in = (n < N)[:, None], (assignments >= 0)[None, :]
        gates = weight + expert.to(tl.int64) * w_e + n[:, None] * w_n
        ups = gates + tl.cast(N, tl.int64) * w_n
        x_rows = x + (tl.maximum(assignments, 0) // MOST).to(tl.int64)[None, :] * x_r
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
        places = out + tl.maximum(assignments, 0).to(tl.int64)[None, :] * o_a + n[:, None]
        tl.store(places, silu_mul(gate, up, out.dtype.element_ty), w_in & x_in)


@kernel(_DOWN_TRAFFIC, do_not_specialize=["rows", "num_tiles"])
def _down_kernel(
    x, weight, weights, out, experts, order, tiles, rows, num_tiles,
    x_a, w_e, w_n, o_p, o_r,
    N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr, TILE_R: tl.constexpr, FEW: tl.constexpr, TILE_A: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a strip of outputs of one expert's rows, weighted."""
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, assignments = load_tile_routing(
        experts, order, tiles, tl.program_id(1), rows, num_tiles,
        MOST, TILE_R, FEW, TILE_A,
    )  # fmt: skip
    if tl.max(assignments, 0) >= 0:
        w_in, x_in = (n < N)[:, None], (assignments >= 0)[None, :]
        assignment = tl.maximum(assignments, 0).to(tl.int64)
        w_rows = weight + expert.to(tl.int64) * w_e + n[:, None] * w_n
        x_rows = x + assignment[None, :] * x_a
        total = tl.zeros((TILE_N, TILE_R), tl.float32)
        for at in tl.range(0, K, TILE_K, num_stages=STAGES):
            k = at + tl.arange(0, TILE_K)
            w_tile, x_tile = w_in, x_in
            if K % TILE_K:
                w_tile, x_tile = w_in & (k < K)[None, :], x_in & (k < K)[:, None]
            w = tl.load(w_rows + k[None, :], w_tile, other=0.0)
            total = dot(w, tl.load(x_rows + k[:, None], x_tile, other=0.0), total)
        counts = tl.load(weights + assignment, assignments >= 0, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32) * counts[None, :]
        places = (
            out
            + (assignment % MOST)[None, :] * o_p
            + (assignment // MOST)[None, :] * o_r
            + n[:, None]
        )
        tl.store(places, total, w_in & x_in)


def expert_gate_up(x: Tensor, weight: Tensor, routing: ExpertRouting) -> Tensor:
    """Compute the first half of each routed expert's MLP, ``[assignments, outputs]``.

    ``weight`` is ``[experts, 2 * outputs, inputs]``, gates first.
    """
    out = x.new_empty((routing.experts.numel(), weight.shape[1] // 2))
    _launch(_gate_up_kernel, x, weight, routing, 2, out=out, x_r=x.stride(0), o_a=out.stride(0))
    return out


def expert_down(x: Tensor, weight: Tensor, weights: Tensor, routing: ExpertRouting) -> Tensor:
    """Compute the second half, ``[most, rows, outputs]`` in float32, still to be added up.

    Results are multiplied by ``weights``, ``[rows, most]``.
    """
    rows, most = routing.experts.shape
    out = x.new_empty((most, rows, weight.shape[1]), dtype=torch.float32)
    _launch(
        _down_kernel, x, weight, routing, 1,
        weights=weights, out=out, x_a=x.stride(0), **strides("o_pr", out.stride()),
    )  # fmt: skip
    return out


def _launch(
    gemm: TritonKernel,
    x: Tensor,
    weight: Tensor,
    routing: ExpertRouting,
    strips: int,
    **arguments: Any,
) -> None:
    """Launch a GEMM whose weights have ``strips`` rows for each output."""
    rows, most = routing.experts.shape
    outputs, inputs = weight.shape[1] // strips, weight.shape[2]
    tile_k = _LARGE_TILE_K if routing.tile_rows == _MIN_ROWS else _LARGE_TILE_K // 2
    tile_bytes = (strips * _TILE_N + routing.tile_rows) * tile_k * x.element_size()
    gemm.launch(
        (cdiv(outputs, _TILE_N), routing.num_tiles),
        x=x, weight=weight, **strides("w_en", weight.stride()), **arguments,
        experts=routing.experts, order=routing.order, tiles=routing.tiles, rows=rows,
        num_tiles=routing.num_tiles, N=outputs, K=inputs, TILE_N=_TILE_N, TILE_K=tile_k,
        STAGES=num_stages(tile_bytes, x.get_device()), MOST=most, TILE_R=routing.tile_rows,
        FEW=routing.has_few_rows, TILE_A=routing.tile_assignments,
    )  # fmt: skip
