"""Maps of matrices, by which one instruction fetches a tile."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program
    from roseinfer.layer_traits import LayerTraits

SIDE = 64
"""Inputs that lie side by side in a tile: every tile has a multiple of so many."""
MAP_BYTES = 128
_ALIGNED = 64
_BFLOAT16 = 9
_SIZE = 2
_NOT_INTERLEAVED = 0
_SWIZZLED_128_BYTES = 3
_FETCHED_256_BYTES = 3
"""How much the second-level cache fetches at a time."""
_ZEROS_BEYOND = 0


def tensor_maps(
    encode: Callable[..., object], matrices: Sequence[tuple[Tensor, int]], rows: int
) -> Tensor:
    """Return the maps of matrices ``[outputs, inputs]``, with so many inputs in a tile of each.

    ``encode`` is the driver's ``cuTensorMapEncodeTiled``, or stands in for it; it raises by itself.
    """
    maps = torch.empty((len(matrices), MAP_BYTES), dtype=torch.uint8)
    for own, (weight, inputs) in zip(maps, matrices, strict=True):
        outputs, width = weight.shape
        lies = weight.data_ptr(), outputs, width, weight.stride(0)
        write_map(encode, own.data_ptr(), *lies, rows, inputs)
    return maps.to(matrices[0][0].device)


def write_map(
    encode: Callable[..., object],
    to: int,
    matrix: int,
    rows: int,
    inputs: int,
    pitch: int,
    tile_rows: int,
    tile_inputs: int = SIDE,
) -> None:
    """Write a map of the matrix at an address as inputs side by side, rows, and groups of inputs.

    Rows are ``pitch`` numbers apart. A tile is groups of SIDE inputs of some rows each.
    """
    assert to % _ALIGNED == 0
    encode(
        ctypes.c_void_p(to),
        _BFLOAT16,
        3,
        ctypes.c_void_p(matrix),
        (ctypes.c_uint64 * 3)(SIDE, rows, inputs // SIDE),
        (ctypes.c_uint64 * 2)(pitch * _SIZE, SIDE * _SIZE),
        (ctypes.c_uint32 * 3)(SIDE, tile_rows, tile_inputs // SIDE),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _NOT_INTERLEAVED,
        _SWIZZLED_128_BYTES,
        _FETCHED_256_BYTES,
        _ZEROS_BEYOND,
    )


@lru_cache(1 << 14)
def encoded(encode: Callable[..., object], *matrix: int) -> bytes:
    """Return the map of a matrix. It depends on nothing but where and how the matrix lies.

    ``matrix`` are the arguments of ``write_map`` behind the place that is written to.
    """
    room = (ctypes.c_ubyte * (MAP_BYTES + _ALIGNED))()
    begin = -ctypes.addressof(room) % _ALIGNED
    write_map(encode, ctypes.addressof(room) + begin, *matrix)
    return bytes(room)[begin : begin + MAP_BYTES]


if TYPE_CHECKING:
    Place = tuple[int, int, int, int]


# Matrices of which a GPU with warpgroups fetches and multiplies tiles.


Map = ctypes.c_ubyte * MAP_BYTES
"""How the copy engine knows a matrix."""
_CAPABILITY = 9
"""No other GPUs multiply in this way."""
_ROW_ALIGNED = 16
"""Bytes."""


@cache
def has_warpgroups(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell if a device has the kernels at all, for numbers of a kind."""
    if device.type != "cuda" or torch.version.hip is not None or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _CAPABILITY


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def lies_well(matrix: Tensor) -> bool:
    """Tell if the copy engine can fetch tiles of a matrix."""
    return (
        has_warpgroups(matrix.device, matrix.dtype)
        and matrix.stride(1) == 1
        and matrix.data_ptr() % _ROW_ALIGNED == 0
        and matrix.stride(0) * matrix.element_size() % _ROW_ALIGNED == 0
    )


def place_of(matrix: Tensor) -> Place:
    """Return where a matrix lies: its address, rows and columns, and numbers between rows."""
    rows, columns = matrix.shape
    return matrix.data_ptr(), rows, columns, matrix.stride(0)


def map_of(
    encode: Callable[..., object], place: Place, rows: int, columns: int = SIDE
) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the map of a matrix, whose tiles have so many rows and columns.

    ``encode`` is a program's.
    """
    return Map.from_buffer_copy(encoded(encode, *place, rows, columns))


# Caches of keys and values of which the copy engine fetches tiles, and what looks at them.


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
