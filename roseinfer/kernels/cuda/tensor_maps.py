"""Tensor maps of matrices, by which one instruction fetches a tile."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

SIDE = 64
"""Contiguous inputs of a tile, whose inputs are a multiple of this."""
MAP_BYTES = 128
MAP_ALIGNMENT = 64
_BFLOAT16 = 9
_ELEMENT_BYTES = 2
_NOT_INTERLEAVED = 0
_SWIZZLED_128_BYTES = 3
_L2_PROMOTION_256_BYTES = 3
"""Promotion of fetches to 256 bytes in the L2 cache."""
_OUT_OF_BOUNDS_ZEROS = 0


def tensor_maps(
    encode: Callable[..., object], matrices: Sequence[tuple[Tensor, int]], rows: int
) -> Tensor:
    """Return the maps of matrices ``[outputs, inputs]``, each with the inputs of its tiles.

    ``encode`` is the driver's ``cuTensorMapEncodeTiled`` or a replacement; it raises errors itself.
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
    """Write a map of the matrix at an address: contiguous inputs, rows, and groups of inputs.

    Rows are ``pitch`` elements apart. A tile is groups of SIDE inputs of some rows each.
    """
    assert to % MAP_ALIGNMENT == 0
    encode(
        ctypes.c_void_p(to),
        _BFLOAT16,
        3,
        ctypes.c_void_p(matrix),
        (ctypes.c_uint64 * 3)(SIDE, rows, inputs // SIDE),
        (ctypes.c_uint64 * 2)(pitch * _ELEMENT_BYTES, SIDE * _ELEMENT_BYTES),
        (ctypes.c_uint32 * 3)(SIDE, tile_rows, tile_inputs // SIDE),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _NOT_INTERLEAVED,
        _SWIZZLED_128_BYTES,
        _L2_PROMOTION_256_BYTES,
        _OUT_OF_BOUNDS_ZEROS,
    )


# Matrices whose tiles a GPU with warpgroups fetches and multiplies.


TensorMap = ctypes.c_ubyte * MAP_BYTES
"""A tensor map, the copy engine's description of a matrix."""


@lru_cache(1 << 14)
def encode_map(
    encode: Callable[..., object], matrix: tuple[int, ...]
) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the map of a matrix, which depends only on the matrix's address and layout.

    ``matrix`` are the arguments of ``write_map`` after the destination.
    """
    room = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGNMENT))()
    begin = -ctypes.addressof(room) % MAP_ALIGNMENT
    write_map(encode, ctypes.addressof(room) + begin, *matrix)
    return TensorMap.from_buffer_copy(room, begin)


_CAPABILITY = 9
"""Compute capability of the GPUs with warpgroup instructions."""
_ROW_ALIGNMENT = 16
"""Alignment of rows, in bytes."""


@cache
def supports_wgmma(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device can run the warpgroup kernels for a dtype."""
    if device.type != "cuda" or torch.version.hip is not None or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _CAPABILITY


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_tma_aligned(matrix: Tensor) -> bool:
    """Return True if the copy engine can fetch tiles of a matrix."""
    return (
        supports_wgmma(matrix.device, matrix.dtype)
        and matrix.stride(1) == 1
        and matrix.data_ptr() % _ROW_ALIGNMENT == 0
        and matrix.stride(0) * matrix.element_size() % _ROW_ALIGNMENT == 0
    )


class Tiles(NamedTuple):
    """A tensor that a kernel fetches in tiles, by a tensor map."""

    tensor: Tensor
    matrix: tuple[int, ...]
    """Arguments of ``write_map`` after the destination."""


def matrix_tiles(matrix: Tensor, rows: int, columns: int = SIDE) -> Tiles:
    """Return the tiles, of ``rows`` rows and ``columns`` columns, of a matrix."""
    layout = matrix.data_ptr(), *matrix.shape, matrix.stride(0)
    return Tiles(matrix, (*layout, rows, columns))


# Caches of keys and values in tiles that the copy engine fetches.


TILE_TOKENS = 64
"""Tokens per tile."""
STRIP = TILE_TOKENS * SIDE * 2
"""Bytes of a tile's tokens by SIDE elements."""
_DIMS = (64, 128)
_MIN_BLOCK_SIZE = 8
"""Smallest block size, in tokens: smaller blocks do not begin where the swizzle pattern does."""
_MAX_GROUP = 16
_VECTOR = 8
"""Elements that are read at once, and their alignment."""
_MAX_CACHE_ROWS = 1 << 31


def are_sizes_supported(dim: int, group: int, block_size: int) -> bool:
    """Return True if tiles fit heads and blocks, and query heads the rows of a GEMM."""
    longer, shorter = max(block_size, TILE_TOKENS), min(block_size, TILE_TOKENS)
    return (
        dim in _DIMS
        and group <= _MAX_GROUP
        and block_size >= _MIN_BLOCK_SIZE
        and longer % shorter == 0
    )


def has_plain_scores(traits: LayerTraits) -> bool:
    """Return True if a layer's scores have no window, soft cap, sinks or slopes."""
    settings = traits.window, traits.softcap, traits.sinks, traits.slopes
    return all(each is None for each in settings)


def cache_tiles(cache: Tensor) -> Tiles:
    """Return the tiles of a cache as a matrix: tokens of one block each."""
    _, _, block_size, dim = cache.shape
    rows, at_once = _cache_rows(cache), min(block_size, TILE_TOKENS)
    return Tiles(cache, (cache.data_ptr(), rows, dim, dim, at_once, SIDE))


def cache_row_strides(cache: Tensor) -> tuple[int, int]:
    """Return the strides of blocks and of heads, in rows of the matrix."""
    return cache.stride(0) // cache.shape[3], cache.stride(1) // cache.shape[3]


def _cache_rows(cache: Tensor) -> int:
    blocks, kv_heads, block_size, _ = cache.shape
    block_rows, head_rows = cache_row_strides(cache)
    return (blocks - 1) * block_rows + (kv_heads - 1) * head_rows + block_size


def angles(rotation: RotaryEmbedding | None) -> dict[str, Tensor | None]:
    """Return the tables of a rotation as arguments, or none."""
    if rotation is None:
        return {"cosines": None, "sines": None}
    return {"cosines": rotation.cosines, "sines": rotation.sines}


def are_heads_aligned(heads: Tensor) -> bool:
    """Return True if threads can read vectors of ``[tokens, heads, head_dim]``."""
    return (
        heads.stride(2) == 1
        and heads.data_ptr() % (_VECTOR * heads.element_size()) == 0
        and all(stride % _VECTOR == 0 for stride in heads.stride()[:2])
    )


def are_caches_tma_aligned(keys: Tensor, values: Tensor) -> bool:
    """Return True if the copy engine can fetch tiles of both caches, which have equal strides."""
    return keys.stride() == values.stride() and all(map(_is_cache_tma_aligned, (keys, values)))


def _is_cache_tma_aligned(cache: Tensor) -> bool:
    dim = cache.shape[3]
    return (
        cache.stride()[2:] == (dim, 1)
        and cache.data_ptr() % (_VECTOR * cache.element_size()) == 0
        and all(stride % dim == 0 for stride in cache.stride()[:2])
        and _cache_rows(cache) < _MAX_CACHE_ROWS
    )
