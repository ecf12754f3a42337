"""Matrices of which a GPU with warpgroups fetches and multiplies tiles."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.tensor_maps import MAP_BYTES, SIDE, encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Place = tuple[int, int, int, int]

Map = ctypes.c_ubyte * MAP_BYTES
"""How the copy engine knows a matrix."""
_CAPABILITY = 9
"""No other GPUs multiply in this way."""
_ALIGNED = 16
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
        and matrix.data_ptr() % _ALIGNED == 0
        and matrix.stride(0) * matrix.element_size() % _ALIGNED == 0
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
