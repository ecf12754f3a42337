"""Caches of keys and values of which the copy engine fetches tiles, and what looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.tensor_maps import SIDE, encoded
from roseinfer.kernels.warpgroups.matrices import Map

if TYPE_CHECKING:
    import ctypes

    from torch import Tensor

    from roseinfer.kernels.cuda.gpu_program import Program
    from roseinfer.layer_traits import LayerTraits

TILE_TOKENS = 64
"""Tokens that are looked at together."""
STRIP = TILE_TOKENS * SIDE * 2
"""Bytes of so many tokens by SIDE numbers."""
_DIMS = (64, 128)
_LEAST_BLOCK = 8
"""Tokens: fewer do not begin where the copy engine's order of pieces does."""
_MOST_GROUP = 16
_PIECE = 8
"""Numbers that are read at once, which begin at a multiple of as many."""
_MOST_CACHE_ROWS = 1 << 31


def sizes_fit(dim: int, group: int, block_size: int) -> bool:
    """Tell if tiles fit heads and blocks, and query heads the rows of a product."""
    longer, shorter = max(block_size, TILE_TOKENS), min(block_size, TILE_TOKENS)
    return (
        dim in _DIMS
        and group <= _MOST_GROUP
        and block_size >= _LEAST_BLOCK
        and longer % shorter == 0
    )


def is_plain(traits: LayerTraits) -> bool:
    """Tell if a layer attends to all tokens alike, by their scores."""
    asked = traits.window, traits.cap, traits.sinks, traits.slopes
    return all(each is None for each in asked)


def map_of_cache(program: Program, cache: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the map of a cache as a matrix, of which a tile is tokens that lie in one block."""
    _, _, block_size, dim = cache.shape
    rows, at_once = _cache_rows(cache), min(block_size, TILE_TOKENS)
    where = cache.data_ptr(), rows, dim, dim, at_once, SIDE
    return Map.from_buffer_copy(encoded(program.encode, *where))


def rows_between(cache: Tensor) -> tuple[int, int]:
    """Return how many rows of a matrix lie between blocks, and between heads."""
    return cache.stride(0) // cache.shape[3], cache.stride(1) // cache.shape[3]


def _cache_rows(cache: Tensor) -> int:
    blocks, kv_heads, block_size, _ = cache.shape
    block_rows, head_rows = rows_between(cache)
    return (blocks - 1) * block_rows + (kv_heads - 1) * head_rows + block_size


def heads_lie_well(heads: Tensor) -> bool:
    """Tell if threads can read pieces of ``[tokens, heads, head_dim]``."""
    return (
        heads.stride(2) == 1
        and heads.data_ptr() % (_PIECE * heads.element_size()) == 0
        and all(stride % _PIECE == 0 for stride in heads.stride()[:2])
    )


def caches_lie_well(keys: Tensor, values: Tensor) -> bool:
    """Tell if the copy engine can fetch tiles of both caches, which lie alike."""
    return keys.stride() == values.stride() and all(map(_lies_well, (keys, values)))


def _lies_well(cache: Tensor) -> bool:
    dim = cache.shape[3]
    return (
        cache.stride()[2:] == (dim, 1)
        and cache.data_ptr() % (_PIECE * cache.element_size()) == 0
        and all(stride % dim == 0 for stride in cache.stride()[:2])
        and _cache_rows(cache) < _MOST_CACHE_ROWS
    )
