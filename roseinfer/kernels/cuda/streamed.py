"""Launching products of a few rows whose weights stream through shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import SIDE, Map, lies_well, map_of, place_of
from roseinfer.kernels.cuda.toolchain import add_product, loaded
from roseinfer.kernels.runtime import num_tiles
from roseinfer.kernels.traffic import announced

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program

# How products of a few rows are cut into tiles, and the source of the kernel for that.


OUTPUTS = 64
"""Of a tile of weights: a warpgroup's product has no fewer."""
MOST_ROWS = 64
_FEWEST_ROWS = 16
_FEWEST_FOR_TWO = 32
"""Rows from which on two warpgroups share them."""
_OF_WEIGHTS = OUTPUTS * SIDE * 2
_ROOM = 200 << 10
"""Bytes of tiles in a program, which has a multiprocessor to itself then."""
_IN_FLIGHT = 64 << 10
"""Bytes of weights of a program on their way. More made what others wait for slower on an H200."""
DEEPEST = 2
"""By 64 inputs of a tile, where it has one strip of outputs."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the compiler is told, under these names in capitals."""

    columns: int
    """Rows of a warpgroup's product."""
    groups: int
    """Warpgroups of a program, with as many rows each."""
    strips: int
    """Of outputs: two where one gates the other."""
    depth: int
    """By 64 inputs of a tile."""
    stages: int
    """Tiles of weights and of rows that have room at a time."""
    in_flight: int
    """Tiles of weights that are asked for at a time."""

    @property
    def rows(self) -> int:
        return self.columns * self.groups

    @property
    def threads(self) -> int:
        """A program has two warps that fetch beside those that multiply."""
        return self.groups * 128 + 64

    @property
    def weights_bytes(self) -> int:
        return self.depth * self.strips * _OF_WEIGHTS

    @property
    def stage_bytes(self) -> int:
        return self.weights_bytes + self.depth * self.rows * SIDE * 2

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a program is given, with room for the ring's barriers."""
        return self.stages * self.stage_bytes + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = toolchain.machine("machine", "warpgroup") if machine else []
        if machine:
            own.append(add_product(self.columns))
        return "\n".join([*own, *toolchain.shared(), toolchain.part(__package__, "streamed")])


@cache
def tiles_for(rows: int, strips: int) -> Tiles:
    """Choose the tiles of a product: the fastest tried on an H200."""
    padded = max(_FEWEST_ROWS, 1 << (rows - 1).bit_length())
    groups = 1 if padded < _FEWEST_FOR_TWO else 2
    one = Tiles(padded // groups, groups, strips, DEEPEST // strips, 1, 1)
    stages = _ROOM // one.stage_bytes
    in_flight = min(stages, _IN_FLIGHT // one.weights_bytes)
    return Tiles(one.columns, groups, strips, one.depth, stages, in_flight)


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
