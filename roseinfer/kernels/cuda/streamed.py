"""Launching of GEMMs of a few rows whose weights stream through shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    TensorMap,
    is_tma_aligned,
    matrix_layout,
    matrix_map,
)
from roseinfer.kernels.cuda.toolchain import compile_and_load, wgmma_accumulate_source
from roseinfer.kernels.runtime import cdiv
from roseinfer.kernels.traffic import notify_launch_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program

# Tiles of the streaming GEMM, and its source.


OUTPUTS = 64
"""Outputs of a tile of weights, the fewest of a warpgroup's GEMM."""
MAX_ROWS = 64
_MIN_ROWS = 16
_MIN_ROWS_FOR_TWO_WARPGROUPS = 32
"""Smallest number of rows that two warpgroups share."""
_STRIP_BYTES = OUTPUTS * SIDE * 2
_MAX_TILE_BYTES = 200 << 10
"""Bytes of tiles in a program, which has a multiprocessor to itself then."""
_MAX_BYTES_IN_FLIGHT = 64 << 10
"""Bytes of weights in flight per program. More delayed other loads on an H200."""
MAX_DEPTH = 2
"""Largest depth of a tile, in units of 64 inputs, with one strip of outputs."""


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Compile-time sizes, which the source has as macros in capitals."""

    columns: int
    """Rows of a warpgroup's GEMM."""
    groups: int
    """Warpgroups of a program, with as many rows each."""
    strips: int
    """Strips of outputs: two where one gates the other."""
    depth: int
    """Depth of a tile, in units of 64 inputs."""
    stages: int
    """Tiles of weights and of rows that fit at a time."""
    in_flight: int
    """Tiles of weights that are requested at a time."""

    @property
    def rows(self) -> int:
        return self.columns * self.groups

    @property
    def threads(self) -> int:
        """Threads of a program: two warps fetch, and the others multiply."""
        return self.groups * 128 + 64

    @property
    def weights_bytes(self) -> int:
        return self.depth * self.strips * _STRIP_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.weights_bytes + self.depth * self.rows * SIDE * 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, with space for the ring's barriers."""
        return self.stages * self.stage_bytes + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, with_machine: bool = True) -> str:
        """Return the kernel's source; without the machine's sources, others must replace them."""
        machine = toolchain.machine_sources("machine", "warpgroup") if with_machine else []
        if with_machine:
            machine.append(wgmma_accumulate_source(self.columns))
        return "\n".join(
            [*machine, *toolchain.shared_sources(), toolchain.source_part(__package__, "streamed")]
        )


@cache
def tiles_for(rows: int, strips: int) -> GemmTiles:
    """Choose the tiles of a GEMM: the fastest tried on an H200."""
    padded = max(_MIN_ROWS, 1 << (rows - 1).bit_length())
    groups = 1 if padded < _MIN_ROWS_FOR_TWO_WARPGROUPS else 2
    one = GemmTiles(padded // groups, groups, strips, MAX_DEPTH // strips, 1, 1)
    stages = _MAX_TILE_BYTES // one.stage_bytes
    in_flight = min(stages, _MAX_BYTES_IN_FLIGHT // one.weights_bytes)
    return GemmTiles(one.columns, groups, strips, one.depth, stages, in_flight)


KERNEL = "stream_linear"
"""The kernel's name in the source."""


class ProductParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source; its size is a multiple of 64 bytes."""

    _fields_ = (
        ("weights", TensorMap),
        ("rows", TensorMap),
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


def can_stream_gemm(x: Tensor, weight: Tensor, parts: int, strips: int) -> bool:
    """Return True if the kernel can compute this GEMM; compile it then."""
    rows, inputs = len(x), weight.shape[1]
    fit = (
        rows <= MAX_ROWS
        and inputs % (parts * MAX_DEPTH * SIDE) == 0
        and all(is_tma_aligned(matrix) for matrix in (x, weight))
    )
    return fit and program_of(tiles_for(rows, strips), x.device) is not None


def stream_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    strips: int,
    program: Program | None = None,
) -> None:
    """Compute ``x @ weight.T + bias`` into ``[parts, rows, outputs]``.

    Of two strips, the first are gates and the second the gated values. ``program`` replaces the
    device's kernel.
    """
    parts, rows, outputs = out.shape
    tiles = tiles_for(rows, strips)
    program = program or program_of(tiles, x.device)
    assert program is not None
    params = ProductParams(
        weights=matrix_map(program.encode, matrix_layout(weight), OUTPUTS, tiles.depth * SIDE),
        rows=matrix_map(program.encode, matrix_layout(x), tiles.rows, tiles.depth * SIDE),
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
    with notify_launch_hooks(KERNEL, partial(_traffic, x, weight, bias, out)):
        program.launch(params, cdiv(outputs, OUTPUTS) * parts)


def _traffic(*tensors: Tensor | None) -> list[tuple[Tensor, int]]:
    return [(each, each.nbytes) for each in tensors if each is not None]


def program_of(tiles: GemmTiles, device: torch.device) -> GpuProgram | None:
    """Return the kernel for tiles, or None where it cannot be compiled."""
    return compile_and_load(tiles, KERNEL, device, "GEMMs of few rows run in Triton's kernels")
