"""How fast ALiBi takes off from the score of a distant key, head by head."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes: a geometric series, with the steps in between where heads are left over.

    The series ends at 2 to the power of -8 for the largest power of two that ``heads`` holds.
    """
    whole = 1 << (heads.bit_length() - 1)
    steps = [8 * at / whole for at in range(1, whole + 1)]
    between = [8 * at / (2 * whole) for at in range(1, 2 * whole, 2)]
    return tuple(2.0**-step for step in (steps + between)[:heads])
