"""What several programs saw of a context's parts: stored part by part, then combined in order.

A row of what is stored belongs to one query head of one sequence: first what was seen of its own
token, then the parts that it sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.kernels.context_parts import num_parts, part_of
from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.runtime import launch
from roseinfer.kernels.weighing import fold

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.kernels.moves import Given

_TOGETHER = tl.constexpr(8)
"""Parts that are loaded together."""


def seen_parts_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    """Count what was seen of the new token, and of every part of what is in front of it."""
    lengths, window, heads = given["lengths"], given["WINDOW"], given["Q_HEADS"]

    def seen(name: str, width: int = 1) -> Callable[[], int]:
        def count() -> int:
            rows = 0
            for length in lengths.tolist():
                own = length if given["APPENDS"] else length - 1
                first = max(0, own - window + 1) if window else 0
                rows += 1 + (num_parts(own) - num_parts(first + 1) + 1 if own > first else 0)
            return taken(given[name], rows * heads * width)

        return count

    sums = {name: seen(name) for name in ("weights_max", "weights_sum")}
    return {**sums, "partial": seen("partial", given["D"])}


def _combine_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    out, lengths = given["out"], given["lengths"]
    whole = {"out": taken(out, out.numel()), "lengths": taken(lengths, lengths.numel())}
    return seen_parts_moved(given) | whole


@triton.jit
def parts_seen(first, own):
    """Return the first of the parts that are seen in front of a token, and how many they are."""
    first_part = part_of(first)
    return first_part, tl.where(own > first, part_of(own - 1) - first_part + 1, 0)


@triton.jit
def note_part(
    partial, weights_max, weights_sum, row, top, total, sums, real, d_inside, D: tl.constexpr
):
    """Store what was seen of a part, for the kernel that combines parts."""
    dims = tl.arange(0, sums.shape[1])
    tl.store(weights_max + row, top, real)
    tl.store(weights_sum + row, total, real)
    tl.store(partial + row[:, None] * D + dims[None, :], sums, real[:, None] & d_inside[None, :])


@moves(_combine_moved)
@triton.jit
def _combine_kernel(
    partial, weights_max, weights_sum, lengths, out,
    o_s, o_h, o_d, length_pitch,
    Q_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    APPENDS: tl.constexpr, TILE_D: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program combines what was seen of one sequence's parts for one query head, in order."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (sequence * Q_HEADS + head) * ROWS
    dims = tl.arange(0, TILE_D)
    inside = dims < D
    one = tl.arange(0, 1)
    length = tl.load(lengths + sequence * length_pitch).to(tl.int32)
    own = length if APPENDS else length - 1
    first = tl.maximum(own - WINDOW + 1, 0) if WINDOW else 0
    _, parts = parts_seen(first, own)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    all_top = tl.load(weights_max + row + one)
    all_total = tl.load(weights_sum + row + one)
    all_sums = tl.load(partial + row * D + dims, inside, other=0.0)[None, :]
    for begin in range(1, ROWS if LIMIT else parts + 1, _TOGETHER):
        for more in tl.static_range(_TOGETHER):  # so many loads are on their way at once
            at = begin + more
            there = at + 0 * one <= parts
            top = tl.load(weights_max + row + at + one, there, other=float("-inf"))
            total = tl.load(weights_sum + row + at + one, there, other=0.0)
            sums = tl.load(
                partial + (row + at) * D + dims, inside & (at + 0 * dims <= parts), other=0.0
            )[None, :]
            all_top, all_total, all_sums = fold(all_top, all_total, all_sums, top, total, sums)
    result = tl.sum(all_sums / all_total[:, None], 0)
    tl.store(
        out + sequence * o_s + head * o_h + dims * o_d,
        result.to(out.dtype.element_ty), inside,
    )  # fmt: skip


def combine_parts(
    partial: Tensor,
    weights_max: Tensor,
    weights_sum: Tensor,
    lengths: Tensor,
    out: Tensor,
    rows: int,
    window: int,
    tile_d: int,
    limit: int,
    *,
    appends: bool,
) -> None:
    """Combine what ``note_part`` stored, ``rows`` rows for every query head, into ``out``."""
    sequences, q_heads, head_dim = out.shape
    launch(
        _combine_kernel, (sequences, q_heads),
        partial, weights_max, weights_sum, lengths, out, *out.stride(), lengths.stride(0),
        q_heads, head_dim, rows, window, appends, tile_d, limit,
        num_warps=1, early=appends, as_written=True,
    )  # fmt: skip
