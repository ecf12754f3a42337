"""The end of a split attention: the results of a context's parts are combined."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Kernels work with powers of two: scores are scaled by this first."""


@triton.jit
def combine_kernel(
    partial, weights_max, weights_sum, out,
    parts, o_s, o_h, o_d,
    Q_HEADS: tl.constexpr, D: tl.constexpr, TILE_P: tl.constexpr, TILE_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes one query head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (sequence * Q_HEADS + head) * parts
    part = tl.arange(0, TILE_P)
    dims = tl.arange(0, TILE_D)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    top = tl.load(weights_max + row + part, part < parts, other=float("-inf"))
    total = tl.load(weights_sum + row + part, part < parts, other=0.0)
    # A part behind the end of the context has no maximum and no weight.
    shrink = tl.where(total > 0, tl.exp2(top - tl.max(top, 0)), 0.0)
    inside = (part[:, None] < parts) & (dims[None, :] < D) & (total[:, None] > 0)
    values = tl.load(partial + (row + part[:, None]) * D + dims[None, :], inside, other=0.0)
    weight = tl.sum(total * shrink, 0)
    result = tl.sum(values * shrink[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(
        out + sequence * o_s + head * o_h + dims * o_d,
        result.to(out.dtype.element_ty), dims < D,
    )  # fmt: skip
