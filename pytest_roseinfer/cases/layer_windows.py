"""Draws the window of each layer, around the edges of blocks, and gives a cache such windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter

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


def with_windows(spec: CacheSpec, adapter: type[KVCacheAdapter], windows: Windows) -> CacheSpec:
    """Return the cache with a layer for each window, and with blocks for all who share them."""
    sharing = len({*windows}) if adapter.window_pools == "shared" else 1
    blocks = sharing * spec.num_blocks
    return replace(spec, num_layers=len(windows), num_blocks=blocks, windows=windows)
