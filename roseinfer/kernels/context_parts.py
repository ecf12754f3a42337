"""Where attention cuts a context into parts, each of which is added up by itself.

A part's begin depends on its number alone. So a token gets the same bits whether one program goes
through all of its context or several do, and whether a prompt's kernel looks or that of a decode
step. There are 32 parts of 128 tokens, then 16 of 256, 16 of 512, and so on: any context has
between 16 and 32 parts of its last part's size.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
