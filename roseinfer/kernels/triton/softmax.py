"""The weighted sum that attention is, tile by tile of tokens and part by part of a context.

Every row adds up in one order, whatever kernel does it: its own token and its sink first, then
the parts, and in each part the tiles. What could be computed in two ways is written out, and who
launches these kernels has the compiler join no multiplication with an addition (``as_written``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from roseinfer.kernels.traffic import taken
from roseinfer.kernels.triton.linear import dot

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.traffic import Given
    from roseinfer.layer_traits import LayerTraits

# What a layer's traits make of scores, in the units that the attention kernels work with.


_LOG2_E = 1.4426950408889634
"""Kernels work with powers of two: scores are scaled by this."""
_LOG2_E_IN_KERNELS = tl.constexpr(_LOG2_E)


class ScoreArguments(NamedTuple):
    """The arguments of a kernel that say what becomes of scores, in its order of parameters."""

    scale: float
    """It makes powers of two of the products, or arguments of the tangent where scores are
    capped."""
    cap: float
    sinks: Tensor
    slopes: Tensor
    window: int
    """0 where all before is seen."""
    capped: bool
    sinking: bool
    sloped: bool


def score_arguments(traits: LayerTraits, unused: Tensor) -> ScoreArguments:
    """Return the arguments; ``unused`` stands for what a layer does not have."""
    cap = traits.cap
    return ScoreArguments(
        traits.scale * _LOG2_E if cap is None else traits.scale / cap,
        0.0 if cap is None else cap * _LOG2_E,
        unused if traits.sinks is None else traits.sinks,
        unused if traits.slopes is None else traits.slopes,
        traits.window or 0,
        cap is not None,
        traits.sinks is not None,
        traits.slopes is not None,
    )


def numbers_by_head(given: Given) -> dict[str, int]:
    """Return the bytes that a launch reads of what it has a number of for each query head."""
    heads = given["query"].shape[1]
    flags = {"sinks": "SINKING", "slopes": "SLOPED"}
    return {name: taken(given[name], heads) for name, flag in flags.items() if given[flag]}


@triton.jit
def shape_scores(
    products, cap, slopes, heads, real, distance, CAPPED: tl.constexpr, SLOPED: tl.constexpr
):
    """Return the scores of scaled products, ``[heads, tokens]``, as powers of two."""
    scores = products
    if CAPPED:
        scores = (2 * tl.sigmoid(2 * scores) - 1) * cap  # a hyperbolic tangent
    if SLOPED:
        slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS
        scores -= slope[:, None] * distance
    return scores


@triton.jit
def sink_scores(sinks, heads, real):
    """Return the score of each head's sink, as powers of two."""
    return tl.load(sinks + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS


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


# Where attention cuts a context into parts, each of which is added up by itself.
#
# A part's begin depends on its number alone. So a token gets the same bits whether one program goes
# through all of its context or several do, and whether a prompt's kernel looks or that of a decode
# step. There are 32 parts of 128 tokens, then 16 of 256, 16 of 512, and so on: any context has
# between 16 and 32 parts of its last part's size.


_LEAST = 128
"""Tokens of the first parts; every tile of tokens divides them."""
_SHARES = 16
"""Parts between a length and its double."""
_DOUBLINGS = 16
"""Contexts are shorter than ``_LEAST * 2 * _SHARES << _DOUBLINGS`` tokens: 268 million."""
_LEAST_IN_KERNELS = tl.constexpr(_LEAST)
_SHARES_IN_KERNELS = tl.constexpr(_SHARES)
_DOUBLINGS_IN_KERNELS = tl.constexpr(_DOUBLINGS)


@triton.jit
def part_begin(part):
    """Return the position of a part's first token."""
    doubled = tl.maximum(part // _SHARES_IN_KERNELS - 1, 0)
    return (part - doubled * _SHARES_IN_KERNELS) * (_LEAST_IN_KERNELS << doubled)


@triton.jit
def part_of(position):
    """Return the number of the part that has a position."""
    doubled = 0
    for at in tl.static_range(_DOUBLINGS_IN_KERNELS):
        doubled += (position >= (2 * _SHARES_IN_KERNELS * _LEAST_IN_KERNELS << at)).to(tl.int32)
    return position // (_LEAST_IN_KERNELS << doubled) + doubled * _SHARES_IN_KERNELS


def num_parts(tokens: int, window: int | None = None) -> int:
    """Return how many parts contexts of so many tokens have, or how many a window may see."""
    last = max(tokens - 1, 0)
    doubled = max(0, (last // (2 * _SHARES * _LEAST)).bit_length())
    parts = last // (_LEAST << doubled) + doubled * _SHARES + 1
    return parts if window is None else min(parts, (window - 1) // _LEAST + 2)
