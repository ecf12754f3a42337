"""Launching of GEMMs of a few rows whose weights stream through shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    TensorMap,
    is_tma_aligned,
    matrix_tiles,
)
from roseinfer.kernels.cuda.toolchain import read_source, wgmma_header
from roseinfer.kernels.kernel import CudaKernel, numel
from roseinfer.kernels.runtime import cdiv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program

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
_MIN_WIDE_ROWS = 33
"""Smallest number of rows with which a program may have twice as many outputs. Each program reads
all rows: with fewer, they are a small part of what it reads."""
_MIN_WIDE_PROGRAMS = 96
"""Smallest number of programs of twice as many outputs: they fill most of a large GPU."""


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """Compile-time sizes, which the source has as macros in capitals."""

    columns: int
    """Rows of a warpgroup's GEMM."""
    groups: int
    """Warpgroups of a program, with as many rows each."""
    strips: int
    """Strips of 64 outputs; those of gates and of gated values both count."""
    gated: bool
    """True if the first half of the strips gates the other."""
    depth: int
    """Depth of a tile, in units of 64 inputs."""
    stages: int
    """Tiles of weights and of rows that fit at a time."""
    in_flight: int
    """Tiles of weights that are requested at a time."""

    @property
    def outputs(self) -> int:
        """Outputs of a program."""
        return OUTPUTS * (self.strips // 2 if self.gated else self.strips)

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
        return {name.upper(): int(value) for name, value in named.items()}

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the kernel's source; ``headers`` replace its own by name."""
        generated = wgmma_header(accumulate=(self.columns,))
        return read_source("streamed.cu", generated | dict(headers or {}))


@cache
def tiles_for(rows: int, strips: int, *, wide: bool = False) -> GemmTiles:
    """Return the tiles of a GEMM: the fastest tried on an H200.

    ``wide`` programs have twice as many outputs.
    """
    padded = max(_MIN_ROWS, 1 << (rows - 1).bit_length())
    groups = 1 if padded < _MIN_ROWS_FOR_TWO_WARPGROUPS else 2
    gated, strips = strips == 2, strips * (2 if wide else 1)
    one = GemmTiles(padded // groups, groups, strips, gated, max(1, MAX_DEPTH // strips), 1, 1)
    stages = _MAX_TILE_BYTES // one.stage_bytes
    in_flight = min(stages, _MAX_BYTES_IN_FLIGHT // one.weights_bytes)
    return replace(one, stages=stages, in_flight=in_flight)


def _choose_tiles(rows: int, outputs: int, parts: int, strips: int) -> GemmTiles:
    wide_programs = cdiv(outputs, 2 * OUTPUTS) * parts
    wide = rows >= _MIN_WIDE_ROWS and wide_programs >= _MIN_WIDE_PROGRAMS
    return tiles_for(rows, strips, wide=wide)


KERNEL = CudaKernel(
    "stream_linear",
    {
        "weights": TensorMap,
        "rows": TensorMap,
        "out": ctypes.c_void_p,
        "bias": ctypes.c_void_p,
        **dict.fromkeys(("part_stride", "row_stride"), ctypes.c_longlong),
        **dict.fromkeys(("outputs", "num_rows", "parts", "tiles", "out_is_float32"), ctypes.c_int),
    },
    dict.fromkeys(("weights", "rows", "out", "bias"), numel),
    fallback="GEMMs of few rows run in Triton's kernels",
)


def can_stream_gemm(x: Tensor, weight: Tensor, parts: int, strips: int) -> bool:
    """Return True if the kernel can compute this GEMM; compile it then."""
    rows, inputs = x.shape[0], weight.shape[1]
    fit = (
        rows <= MAX_ROWS
        and inputs % (parts * MAX_DEPTH * SIDE) == 0
        and is_tma_aligned(x)
        and is_tma_aligned(weight)
    )
    if not fit:
        return False
    tiles = _choose_tiles(rows, len(weight) // strips, parts, strips)
    return KERNEL.load(tiles, x.device) is not None


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
    tiles = _choose_tiles(rows, outputs, parts, strips)
    program = program or KERNEL.load(tiles, x.device)
    assert program is not None
    KERNEL.launch(
        program,
        cdiv(outputs, tiles.outputs) * parts,
        weights=matrix_tiles(weight, OUTPUTS, tiles.depth * SIDE),
        rows=matrix_tiles(x, tiles.rows, tiles.depth * SIDE),
        out=out,
        bias=bias,
        part_stride=out.stride(0),
        row_stride=out.stride(1),
        outputs=outputs,
        num_rows=rows,
        parts=parts,
        tiles=x.shape[1] // parts // (tiles.depth * SIDE),
        out_is_float32=out.dtype is torch.float32,
    )
