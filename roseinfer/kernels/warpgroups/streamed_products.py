"""Launching products of a few rows whose weights stream through shared memory."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.moves import announced
from roseinfer.kernels.runtime import num_tiles
from roseinfer.kernels.warpgroups.loaded_kernels import loaded
from roseinfer.kernels.warpgroups.matrices import Map, lies_well, map_of, place_of
from roseinfer.kernels.warpgroups.tiles import DEEPEST, MOST_ROWS, OUTPUTS, Tiles, tiles_for

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.cuda.gpu_program import GpuProgram, Program

KERNEL = "stream_linear"
"""Its name in the source."""


class ProductParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source, which ends at a multiple of 64 bytes."""

    _fields_ = (
        ("weights", Map),
        ("rows", Map),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("part_pitch", ctypes.c_longlong),
        ("row_pitch", ctypes.c_longlong),
        ("outputs", ctypes.c_int),
        ("num_rows", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("as_is", ctypes.c_int),
        ("unused", ctypes.c_ubyte * 12),
    )


def streams(x: Tensor, weight: Tensor, parts: int, strips: int) -> bool:
    """Tell if the kernel computes this product, for which it is compiled then."""
    rows, inputs = len(x), weight.shape[1]
    fit = (
        rows <= MOST_ROWS
        and inputs % (parts * DEEPEST * SIDE) == 0
        and all(lies_well(matrix) for matrix in (x, weight))
    )
    return fit and program_of(tiles_for(rows, strips), x.device) is not None


def stream(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    strips: int,
    program: Program | None = None,
) -> None:
    """Compute ``x @ weight.T + bias`` into ``[parts, rows, outputs]``.

    Of two strips the first are gates and the second what they gate. ``program`` is one that is not
    that of the device.
    """
    parts, rows, outputs = out.shape
    tiles = tiles_for(rows, strips)
    program = program or program_of(tiles, x.device)
    assert program is not None
    params = ProductParams(
        weights=map_of(program.encode, place_of(weight), OUTPUTS, tiles.depth * SIDE),
        rows=map_of(program.encode, place_of(x), tiles.rows, tiles.depth * SIDE),
        out=out.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        part_pitch=out.stride(0),
        row_pitch=out.stride(1),
        outputs=outputs,
        num_rows=rows,
        parts=parts,
        tiles=x.shape[1] // parts // (tiles.depth * SIDE),
        as_is=out.dtype is torch.float32,
    )
    with announced(KERNEL, partial(_moved, x, weight, bias, out)):
        program.launch(params, num_tiles(outputs, OUTPUTS) * parts)


def _moved(*tensors: Tensor | None) -> list[tuple[Tensor, int]]:
    return [(each, each.nbytes) for each in tensors if each is not None]


def program_of(tiles: Tiles, device: torch.device) -> GpuProgram | None:
    """Return the kernel for tiles, or None where it cannot be compiled."""
    return loaded(tiles, KERNEL, device, "products of few rows run in Triton's kernels")
