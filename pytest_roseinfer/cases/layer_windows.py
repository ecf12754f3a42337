"""Draws the window of each layer, around the edges of blocks."""

from __future__ import annotations

from hypothesis import strategies as st

Windows = tuple[int | None, ...]


@st.composite
def layer_windows(draw: st.DrawFn, num_layers: int, *, block_size: int, groups: int) -> Windows:
    """Draw up to so many different windows, no window being one of them, and one for each layer."""
    edges = (block_size, 2 * block_size, 3 * block_size)
    sizes = sorted({1, 2} | {edge + more for edge in edges for more in (-1, 0, 1)} - {0})
    kinds = st.one_of(st.sampled_from(sizes), st.none())
    drawn = draw(st.lists(kinds, min_size=1, max_size=min(groups, num_layers), unique=True))
    others = (draw(st.sampled_from(drawn)) for _ in range(num_layers - len(drawn)))
    return (*drawn, *others)
