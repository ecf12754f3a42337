"""Launching products of a few rows whose weights stream through shared memory."""

from __future__ import annotations

import ctypes
import logging
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch

from roseinfer.kernels.cuda.gpu_program import GpuProgram, compiled, early
from roseinfer.kernels.cuda.nvrtc import CannotCompile
from roseinfer.kernels.cuda.tensor_maps import MAP_BYTES, SIDE, encoded
from roseinfer.kernels.moves import announced
from roseinfer.kernels.warpgroups.tiles import DEEPEST, MOST_ROWS, OUTPUTS, Tiles, tiles_for

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "stream_linear"
"""Its name in the source."""
_LOG = logging.getLogger("roseinfer")
_CAPABILITY = 9
"""No other GPUs multiply in this way."""
_ALIGNED = 16
"""Bytes."""
_Map = ctypes.c_ubyte * MAP_BYTES


class ProductParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source, which ends at a multiple of 64 bytes."""

    _fields_ = (
        ("weights", _Map),
        ("rows", _Map),
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


class Program(Protocol):
    def encode(self, *given: object) -> None:
        """Encode the map of a matrix (``tensor_maps.write_map``)."""

    def launch(self, params: ctypes.Structure, programs: int) -> None:
        """Launch so many programs on torch's current stream."""


def streams(x: Tensor, weight: Tensor, parts: int, strips: int) -> bool:
    """Tell if the kernel computes this product, for which it is compiled then."""
    rows, inputs = len(x), weight.shape[1]
    fit = (
        rows <= MOST_ROWS
        and inputs % (parts * DEEPEST * SIDE) == 0
        and all(_lies_well(matrix) for matrix in (x, weight))
    )
    return fit and program_of(tiles_for(rows, strips), x.device) is not None


def has_warpgroups(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell if a device has the kernel at all, for numbers of a kind."""
    if device.type != "cuda" or torch.version.hip is not None or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] == _CAPABILITY


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
        weights=_map(program, weight, OUTPUTS, tiles),
        rows=_map(program, x, tiles.rows, tiles),
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
        program.launch(params, -(-outputs // OUTPUTS) * parts)


def _moved(*tensors: Tensor | None) -> list[tuple[Tensor, int]]:
    return [(each, each.nbytes) for each in tensors if each is not None]


def _map(program: Program, matrix: Tensor, rows: int, tiles: Tiles) -> ctypes.Array[ctypes.c_ubyte]:
    where = matrix.data_ptr(), *matrix.shape, matrix.stride(0)
    return _Map.from_buffer_copy(encoded(program.encode, *where, rows, tiles.depth * SIDE))


def _lies_well(matrix: Tensor) -> bool:
    return (
        has_warpgroups(matrix.device, matrix.dtype)
        and matrix.stride(1) == 1
        and matrix.data_ptr() % _ALIGNED == 0
        and matrix.stride(0) * matrix.element_size() % _ALIGNED == 0
    )


@cache
def program_of(tiles: Tiles, device: torch.device) -> GpuProgram | None:
    """Compile and load the kernel for tiles, or return None where it cannot be."""
    try:
        cubin = compiled(tiles.source(), tiles.defines(), device)
        return GpuProgram(cubin, KERNEL, tiles.threads, tiles.shared_bytes, device, early())
    except CannotCompile as error:
        first = str(error).partition("\n")[0]
        _LOG.warning("products of few rows run in Triton's kernels: %s", first)
        return None
