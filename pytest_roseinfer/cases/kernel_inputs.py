"""Draws what kernels of a paged cache are handed: tensors in any memory layout, and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_roseinfer.cases.payload import VIEWS, lay_out

if TYPE_CHECKING:
    import torch


def strided_views(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Draw a memory layout for the same ``[layers, tokens, heads, head_dim]`` values."""
    return st.sampled_from(VIEWS).map(lambda layout: lay_out(tensor, layout))


@st.composite
def block_tables(draw: st.DrawFn, *, num_blocks: int, most_rows: int = 6) -> list[list[int]]:
    """Draw tables over a pool: two rows have no block in common but in a shared prefix."""
    order = draw(st.permutations(list(range(num_blocks))))
    tables: list[list[int]] = []
    at = 0
    for _ in range(draw(st.integers(1, most_rows))):
        shared: list[int] = []
        sharing: bool = draw(st.booleans())
        if tables and sharing:
            parent = tables[draw(st.integers(0, len(tables) - 1))]
            shared = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.integers(0, num_blocks - at))
        tables.append(shared + list(order[at : at + own]))
        at += own
    return tables
