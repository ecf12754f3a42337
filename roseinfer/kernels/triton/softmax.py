"""Online softmax of attention, tile by tile of tokens and part by part of a context.

Every row is added up in one order, whatever kernel does it: its own token and its sink first, then
the parts, and in each part the tiles. Arithmetic that compilers could order in two ways is written
out, and launches of these kernels forbid the compiler to fuse multiplications with additions
(``no_fp_fusion``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from roseinfer.kernels.triton.linear import dot

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.layer_traits import LayerTraits

# A layer's traits as score arguments, in the units of the attention kernels.


_LOG2_E = 1.4426950408889634
"""Factor of scores: kernels work with powers of two."""
_LOG2_E_IN_KERNELS = tl.constexpr(_LOG2_E)


def score_arguments(traits: LayerTraits, unused: Tensor) -> dict[str, Any]:
    """Return a kernel's arguments that transform scores.

    ``unused`` stands for what a layer does not have. ``scale`` is the factor from query-key
    products to exponents of two, or with a soft cap to arguments of tanh.
    """
    cap = traits.softcap
    return {
        "scale": traits.scale * _LOG2_E if cap is None else traits.scale / cap,
        "cap": 0.0 if cap is None else cap * _LOG2_E,
        "sinks": unused if traits.sinks is None else traits.sinks,
        "slopes": unused if traits.slopes is None else traits.slopes,
        "WINDOW": traits.window or 0,
        "CAPPED": cap is not None,
        "SINKING": traits.sinks is not None,
        "SLOPED": traits.slopes is not None,
    }


PER_HEAD_TRAFFIC = {
    "sinks": lambda query, SINKING: query.shape[1] * SINKING,
    "slopes": lambda query, SLOPED: query.shape[1] * SLOPED,
}
"""Traffic of traits with one number per query head."""


@triton.jit
def transform_scores(
    products, cap, slopes, heads, real, distance, CAPPED: tl.constexpr, SLOPED: tl.constexpr
):
    """Return the scores of scaled products, ``[heads, tokens]``, as exponents of two."""
    scores = products
    if CAPPED:
        scores = (2 * tl.sigmoid(2 * scores) - 1) * cap  # tanh
    if SLOPED:
        slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS
        scores -= slope[:, None] * distance
    return scores


@triton.jit
def sink_scores(sinks, heads, real):
    """Return the score of each head's sink, as an exponent of two."""
    return tl.load(sinks + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS


SUM_COLUMNS = tl.constexpr(8)
"""Columns of the GEMM that adds up a row's weights, all of which are the same."""
_LARGE_TILE = 64
_TILE_BYTES = 1 << 14
"""Largest tile of keys, in bytes.

A program needs two to three times that of shared memory, of which some GPUs have 64 KiB.
"""


def tile_of_tokens(head_bytes: int) -> int:
    """Return the tokens of a tile, which fix how a row is rounded."""
    return min(_LARGE_TILE, max(16, _TILE_BYTES // head_bytes))


@triton.jit
def init_softmax(
    products, own_value, scale, cap, sinks, slopes, heads, real,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKING: tl.constexpr,
):  # fmt: skip
    """Return the state of rows that have attended to their own token and their sink alone."""
    top = transform_scores(
        (products * scale)[:, None], cap, slopes, heads, real, 0.0, CAPPED, SLOPED
    )
    top = tl.sum(top, 1)
    if SINKING:
        sink = sink_scores(sinks, heads, real)
        higher = tl.maximum(top, sink)
        own_weight = tl.exp2(top - higher)
        return higher, own_weight + tl.exp2(sink - higher), own_value * own_weight[:, None]
    return top, tl.full(top.shape, 1.0, tl.float32), own_value


@triton.jit
def empty_softmax(M: tl.constexpr, TILE_D: tl.constexpr):
    """Return the state of rows that have attended to no token of a part."""
    return (
        tl.full((M,), float("-inf"), tl.float32),
        tl.zeros((M, SUM_COLUMNS), tl.float32),
        tl.zeros((M, TILE_D), tl.float32),
    )


@triton.jit
def update_softmax(
    q, k, v, seen, distance, top, total, sums, scale, cap, slopes, heads, real,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Update the state of rows in a part by a tile of tokens.

    The sums of weights are a GEMM too: a sum across a row has another order in other layouts of its
    tile, and a GEMM does not.
    """
    PLAIN: tl.constexpr = not (CAPPED or SLOPED)
    scores = dot(q, tl.trans(k))
    if not PLAIN:
        scores = transform_scores(
            scores * scale, cap, slopes, heads, real, distance, CAPPED, SLOPED
        )
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.max(scores, 1)
    if PLAIN:
        highest *= scale
    higher = tl.maximum(top, highest)
    # No scores so far: infinity minus infinity is NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - finite)
    if PLAIN:  # one instruction, instead of two for every score
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
def row_weight_sum(total):
    """Return a row's sum of weights, which all its columns hold."""
    return tl.max(total, 1)


@triton.jit
def merge_softmax(all_top, all_total, all_sums, top, total, sums):
    """Merge the state of rows in a part into that of the parts before it."""
    higher = tl.maximum(all_top, top)
    shrink = tl.exp2(all_top - higher)
    weight = tl.exp2(top - higher)
    return (
        higher,
        all_total * shrink + total * weight,
        all_sums * shrink[:, None] + sums * weight[:, None],
    )


# Parts of a context, each of which is added up by itself.
#
# A part's begin depends on its number alone. So a token gets the same bits whether one program goes
# through all of its context or several do, in the prefill and in the decode kernel. There are 32
# parts of 128 tokens, then 16 of 256, 16 of 512, and so on: any context has between 16 and 32 parts
# of its last part's size.


_MIN_PART_TOKENS = 128
"""Tokens of the first parts; every tile's size divides them."""
_PARTS_PER_DOUBLING = 16
"""Parts between a length and its double."""
_MAX_DOUBLINGS = 16
"""Doublings of a part's size.

Contexts have fewer than ``_MIN_PART_TOKENS * 2 * _PARTS_PER_DOUBLING << _MAX_DOUBLINGS`` tokens,
268 million.
"""
_MIN_PART_TOKENS_IN_KERNELS = tl.constexpr(_MIN_PART_TOKENS)
_PARTS_PER_DOUBLING_IN_KERNELS = tl.constexpr(_PARTS_PER_DOUBLING)
_MAX_DOUBLINGS_IN_KERNELS = tl.constexpr(_MAX_DOUBLINGS)


@triton.jit
def part_begin(part):
    """Return the position of a part's first token."""
    doubled = tl.maximum(part // _PARTS_PER_DOUBLING_IN_KERNELS - 1, 0)
    return (part - doubled * _PARTS_PER_DOUBLING_IN_KERNELS) * (
        _MIN_PART_TOKENS_IN_KERNELS << doubled
    )


@triton.jit
def part_index(position):
    """Return the number of the part that contains a position."""
    doubled = 0
    for at in tl.static_range(_MAX_DOUBLINGS_IN_KERNELS):
        doubled += (
            position >= (2 * _PARTS_PER_DOUBLING_IN_KERNELS * _MIN_PART_TOKENS_IN_KERNELS << at)
        ).to(tl.int32)
    return (
        position // (_MIN_PART_TOKENS_IN_KERNELS << doubled)
        + doubled * _PARTS_PER_DOUBLING_IN_KERNELS
    )


def num_context_parts(tokens: int, window: int | None = None) -> int:
    """Return the parts of a context of ``tokens`` tokens, or the most that a window can overlap."""
    last = max(tokens - 1, 0)
    doubled = max(0, (last // (2 * _PARTS_PER_DOUBLING * _MIN_PART_TOKENS)).bit_length())
    parts = last // (_MIN_PART_TOKENS << doubled) + doubled * _PARTS_PER_DOUBLING + 1
    return parts if window is None else min(parts, (window - 1) // _MIN_PART_TOKENS + 2)
