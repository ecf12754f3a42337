"""What stands where nobody may read: NaNs that say how they came there.

A dtype of 8 bits has no room for that, and one of integers has no NaN: there poison is plain.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_QUIET = {
    torch.float16: (torch.int16, 0x7E00, 6),
    torch.bfloat16: (torch.int16, 0x7FC0, 3),
    torch.float32: (torch.int32, 0x7FC0_0000, 19),
    torch.float64: (torch.int64, 0x7FF8 << 48, 48),
}
"""Of each dtype: its bits as an integer, the bits of NaN, and the place of three that are free."""


class Poison(IntEnum):
    """Why a place must not be read; its NaNs carry the value."""

    NEVER_WRITTEN = 1
    FREED = 2
    INPUT = 3
    NOT_YET = 4


_WORDS = {
    Poison.NEVER_WRITTEN: "poison (nothing has been written there yet)",
    Poison.FREED: "poison (the block was freed, and nothing has been written there since)",
    Poison.INPUT: "poison (input was kept and not copied: its memory has another use now)",
    Poison.NOT_YET: "poison (the device has not come to it yet)",
}
BITS = {
    (dtype, why): nan | why << place for dtype, (_, nan, place) in _QUIET.items() for why in Poison
}
WORDS = {(dtype, bits): _WORDS[why] for (dtype, why), bits in BITS.items()}
"""What the bits of a number say, if it is poison."""
ANY_NAN = "NaN (poison, or what became of it)"
NANS = {
    (dtype, why): torch.tensor(bits, dtype=_QUIET[dtype][0]).view(dtype)
    for (dtype, why), bits in BITS.items()
}


def poison(tensor: torch.Tensor, why: Poison) -> None:
    """Overwrite what nobody may read: with NaN, or with codes at the end of their range."""
    if tensor.is_floating_point():
        tensor.copy_(NANS.get((tensor.dtype, why), torch.tensor(float("nan"))))
    else:
        codes = torch.iinfo(tensor.dtype)
        tensor.fill_(codes.min or codes.max)
