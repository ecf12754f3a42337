"""Products of tiles, as exact as the device makes them.

Triton's interpreter would multiply the bits that a bfloat16 is stored as. There the factors are
widened first, which changes no product that float32 can hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from roseinfer.kernels.runtime import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total=None):
    """``a @ b``, added to ``total`` where there is one, in float32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def add_after(product, added):
    """Add to a finished product, with the same rounding for any tile size.

    Where one tile holds all inputs, Triton's compiler would turn ``product + added`` into a product
    whose accumulator starts at ``added``, which rounds differently.
    """
    return tl.fma(product, 1.0, added)
