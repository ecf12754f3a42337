"""Maps of matrices, by which one instruction fetches a tile of weights."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.persistent.sizes import ROWS, SIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_BYTES = 128
_ALIGNED = 64
_BFLOAT16 = 9
_NOT_INTERLEAVED = 0
_SWIZZLED_128_BYTES = 3
_FETCHED_256_BYTES = 3
"""How much the second-level cache fetches at a time."""
_ZEROS_BEYOND = 0


def tensor_maps(encode: Callable[..., object], matrices: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the maps of matrices ``[outputs, inputs]``, with so many inputs in a tile of each.

    ``encode`` is the driver's ``cuTensorMapEncodeTiled``, or stands in for it; it raises by itself.
    """
    maps = torch.empty((len(matrices), _BYTES), dtype=torch.uint8)
    assert maps.data_ptr() % _ALIGNED == 0
    for own, (weight, chunk) in zip(maps, matrices, strict=True):
        _encode(encode, own, weight, chunk)
    return maps.to(matrices[0][0].device)


def _encode(encode: Callable[..., object], own: Tensor, weight: Tensor, chunk: int) -> None:
    """Write a map of a matrix as inputs side by side, outputs, and groups of such inputs."""
    outputs, inputs = weight.shape
    size = weight.element_size()
    encode(
        ctypes.c_void_p(own.data_ptr()),
        _BFLOAT16,
        3,
        ctypes.c_void_p(weight.data_ptr()),
        (ctypes.c_uint64 * 3)(SIDE, outputs, inputs // SIDE),
        (ctypes.c_uint64 * 2)(inputs * size, SIDE * size),
        (ctypes.c_uint32 * 3)(SIDE, ROWS, chunk // SIDE),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _NOT_INTERLEAVED,
        _SWIZZLED_128_BYTES,
        _FETCHED_256_BYTES,
        _ZEROS_BEYOND,
    )
