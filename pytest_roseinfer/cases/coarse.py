"""Numbers for caches that round: coarse enough to stay apart, and of sizes that tell scales apart.

All elements of a token are about as large as its greatest, so that none of them is lost in the
rounding. Its greatest is up to 32 times as large as that of the next token or, where a block has
one scale, up to 256 times that of the next block, so that the scale of another one shows. Elements
are below 2, as attention needs them, and where tokens are rounded one by one no ``float8_e4m3fn``
of them is subnormal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_TELLING = 4
"""Elements of a row that can tell whether it is another one enlarged."""
_ALIKE = 0.995


def coarse(element: Tensor, token: Tensor, page: Tensor, over: str) -> Tensor:
    """Make numbers out of random bits: of each element, of its token, and of its page."""
    size = 0.5 + (element & 0xFFFF) / (1 << 17)
    sign = 1 - 2 * ((element >> 16) & 1)
    # The tokens of a page that has one scale differ by an octave, or small ones would be lost.
    octave = token % 6 if over == "token" else page % 5 * 2 + token % 2
    return sign * size * torch.exp2(1.0 - octave)


def times_as_large(want: Tensor, found: Tensor) -> float | None:
    """Say how many times as large as wanted a row is, as with the scale of another, if it is so."""
    if found.dtype != want.dtype or len(want) < _TELLING:
        return None
    cosine = float(torch.cosine_similarity(want.double(), found.double(), 0))
    return float(found.norm() / want.norm()) if cosine > _ALIKE else None
