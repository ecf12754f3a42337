"""Draws texts that begin alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_roseinfer.oracle.texts import WHOLE

if TYPE_CHECKING:
    from pytest_roseinfer.oracle.texts import Branch


@st.composite
def text_branches(draw: st.DrawFn, *, block_size: int, most: int = 4) -> tuple[Branch, ...]:
    """Draw texts that begin alike, up to a block's edge, around it or inside, or are equal."""
    edges = {block_size, 2 * block_size}
    inside = block_size + block_size // 2
    lengths = sorted({WHOLE, 0, 1, inside, *(edge + more for edge in edges for more in (-1, 0, 1))})
    branches: list[Branch] = [(0, 0)]
    for text in range(1, draw(st.integers(1, most))):
        length: int = draw(st.sampled_from([WHOLE, WHOLE, *lengths]))
        branches.append((draw(st.integers(0, text - 1)), length))
    return tuple(branches)
