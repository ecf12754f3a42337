"""The weighted sum that attention is, tile by tile of tokens and part by part of a context.

Every row adds up in one order, whatever kernel does it: its own token and its sink first, then
the parts, and in each part the tiles. What could be computed in two ways is written out, and who
launches these kernels has the compiler join no multiplication with an addition (``as_written``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from roseinfer.kernels.products.dot import dot
from roseinfer.kernels.scores import shape_scores, sink_scores

SUM_COLUMNS = tl.constexpr(8)
"""Columns of the product that adds up a row's weights, all of which are the same."""
_LARGE_TILE = 64
_TILE_BYTES = 1 << 14
"""A tile's keys take at most so many. A program needs two to three times that of shared memory,
of which some GPUs have 64 KiB."""


def tile_of_tokens(head_bytes: int) -> int:
    """Return how many tokens are looked at together, which decides how a row is rounded."""
    return min(_LARGE_TILE, max(16, _TILE_BYTES // head_bytes))


@triton.jit
def own_token(
    products, own_value, scale, cap, sinks, slopes, heads, real,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKING: tl.constexpr,
):  # fmt: skip
    """Return the state of rows that have seen their own token and their sink alone."""
    top = shape_scores((products * scale)[:, None], cap, slopes, heads, real, 0.0, CAPPED, SLOPED)
    top = tl.sum(top, 1)
    if SINKING:
        sink = sink_scores(sinks, heads, real)
        higher = tl.maximum(top, sink)
        own_weight = tl.exp2(top - higher)
        return higher, own_weight + tl.exp2(sink - higher), own_value * own_weight[:, None]
    return top, tl.full(top.shape, 1.0, tl.float32), own_value


@triton.jit
def nothing_seen(M: tl.constexpr, TILE_D: tl.constexpr):
    """Return the state of rows that have seen no token of a part."""
    return (
        tl.full((M,), float("-inf"), tl.float32),
        tl.zeros((M, SUM_COLUMNS), tl.float32),
        tl.zeros((M, TILE_D), tl.float32),
    )


@triton.jit
def see_tile(
    q, k, v, seen, distance, top, total, sums, scale, cap, slopes, heads, real,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens to what rows have seen of a part.

    The sums of weights are a product too: adding up across a row takes another order in other
    layouts of its tile, and a product does not.
    """
    PLAIN: tl.constexpr = not (CAPPED or SLOPED)
    scores = dot(q, tl.trans(k))
    if not PLAIN:
        scores = shape_scores(scores * scale, cap, slopes, heads, real, distance, CAPPED, SLOPED)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.max(scores, 1)
    if PLAIN:
        highest *= scale
    higher = tl.maximum(top, highest)
    # Nothing seen up to here: infinity less infinity is NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - finite)
    if PLAIN:  # one instruction, where there would be two for every score
        scores = tl.fma(scores, scale, -finite[:, None])
    else:
        scores -= finite[:, None]
    weights = tl.exp2(scores).to(v.dtype)
    total = dot(
        weights,
        tl.full((v.shape[0], SUM_COLUMNS), 1.0, tl.float32).to(v.dtype),
        total * shrink[:, None],
    )
    sums = dot(weights, v, sums * shrink[:, None])
    return higher, total, sums


@triton.jit
def of_row(total):
    """Return a row's sum of weights, which all its columns hold."""
    return tl.max(total, 1)


@triton.jit
def fold(all_top, all_total, all_sums, top, total, sums):
    """Add what rows have seen of a part to what they saw of those in front of it."""
    higher = tl.maximum(all_top, top)
    shrink = tl.exp2(all_top - higher)
    weight = tl.exp2(top - higher)
    return (
        higher,
        all_total * shrink + total * weight,
        all_sums * shrink[:, None] + sums * weight[:, None],
    )
