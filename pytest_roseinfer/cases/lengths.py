"""Draws how many tokens to append or to keep, near the boundaries of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_TOKENS = 300


def boundary_lengths(
    block_size: int, *, stored: int = 0, free: int | None = None, windows: Sequence[int] = ()
) -> st.SearchStrategy[int]:
    """Draw a number of tokens to append so that the end falls at, before or after a boundary.

    With the number of ``free`` blocks, the end of the last of them is one more boundary; with
    ``windows``, so is where one more block and where two more have left one.
    """
    room = -stored % block_size
    ends = {0, room, room + block_size, room + (free or 0) * block_size}
    for window in windows:
        left = max(0, stored - window + 1) // block_size
        ends |= {(left + more) * block_size + window - 1 - stored for more in (1, 2)}
    near = {1, 2} | {end + more for end in ends for more in (-1, 0, 1)}
    most = max(_MOST_TOKENS, block_size + 1)
    return st.sampled_from(sorted(count for count in near if 0 < count <= most))


def boundary_cuts(block_size: int, stored: int) -> st.SearchStrategy[int]:
    """Draw a length to cut ``stored`` tokens to: at, before or after a boundary, or the ends."""
    last = stored - stored % block_size
    ends = {0, block_size, last - block_size, last, stored}
    near = {end + more for end in ends for more in (-1, 0, 1)}
    return st.sampled_from(sorted((each for each in near if 0 <= each <= stored), reverse=True))
