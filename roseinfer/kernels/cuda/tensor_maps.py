"""Maps of matrices, by which one instruction fetches a tile."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

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
