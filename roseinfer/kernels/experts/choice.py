"""Choosing which experts each row visits, and how much each of them counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.runtime import launch, power_of_two

if TYPE_CHECKING:
    from roseinfer.kernels.moves import Given

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
