"""Launching of GEMMs of many rows by pairs of programs, with the bits of few rows' GEMMs."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    TensorMap,
    is_tma_aligned,
    matrix_tiles,
    num_multiprocessors,
)
from roseinfer.kernels.cuda.toolchain import read_source, wgmma_header
from roseinfer.kernels.kernel import CudaKernel, numel
from roseinfer.kernels.runtime import cdiv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program

# Compile-time sizes of the paired GEMM, and its source.


ROWS = 128
"""Rows per program: two warpgroups multiply 64 each."""
OUTPUTS = 128
"""Outputs per pair of programs: with more, a thread has no registers for two sums of each."""
_STAGES = 6
_STAGES_WITH_GATES = 4
"""Stages with gates, the most that fit."""


@dataclass(frozen=True, slots=True)
class PairedSizes:
    """Compile-time sizes, which the source has as macros in capitals."""

    gates: bool
    """True for two strips of outputs, of which the first gates the second."""
    stages: int
    """Tiles of rows and of weights that fit at a time."""

    @classmethod
    def choose(cls, *, gates: bool) -> PairedSizes:
        return cls(gates, _STAGES_WITH_GATES if gates else _STAGES)

    @property
    def threads(self) -> int:
        """Threads of a program.

        Two warpgroups multiply, and three threads of a third fetch, which releases registers.
        """
        return 3 * 128

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: a ring, the results, and barriers."""
        of_tile = (ROWS + OUTPUTS * (2 if self.gates else 1)) * SIDE * 2
        return self.stages * of_tile + ROWS * OUTPUTS * 2 + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"shared_bytes": self.shared_bytes}
        return {name.upper(): int(value) for name, value in named.items()}

    def source(self, headers: Mapping[str, str] | None = None) -> str:
        """Return the kernel's source; ``headers`` replace its own by name."""
        generated = wgmma_header(accumulate=(OUTPUTS,), overwrite=(OUTPUTS,))
        return read_source("paired.cu", generated | dict(headers or {}))


_MIN_TILES = 96
"""Smallest number of tiles of rows by outputs: with fewer, too many of a GPU's multiprocessors
idle."""


def _out_elements(own: Tensor, weights: Tensor) -> int:
    """Count outputs twice if the kernel adds to them, which it does without gates."""
    return (2 if len(weights) == own.shape[1] else 1) * own.numel()


KERNEL = CudaKernel(
    "multiply_in_pairs",
    {
        **dict.fromkeys(("rows", "weights", "out"), TensorMap),
        **dict.fromkeys(("outputs", "num_rows", "parts", "tiles", "pairs"), ctypes.c_int),
        "scale": ctypes.c_float,
    },
    {"rows": numel, "weights": numel, "out": _out_elements},
    fallback="GEMMs of many rows run in torch",
)


def can_add_paired_gemm(residual: Tensor, x: Tensor, weight: Tensor, parts: int) -> bool:
    """Return True if ``add_paired_gemm`` is the fastest here; compile it then."""
    fit = is_tma_aligned(residual) and residual.shape[1] % SIDE == 0
    return fit and _fits(x, weight, parts, PairedSizes.choose(gates=False))


def can_pair_gate_up(x: Tensor, gate_up_weight: Tensor) -> bool:
    """Return True if ``paired_gate_up`` is the fastest here; compile it then."""
    fit = gate_up_weight.shape[0] % (2 * SIDE) == 0
    return fit and _fits(x, gate_up_weight, 1, PairedSizes.choose(gates=True))


def add_paired_gemm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    parts: int,
    times: float = 1.0,
    *,
    sizes: PairedSizes | None = None,
    program: Program | None = None,
    pairs: int | None = None,
) -> None:
    """Add ``times`` the sum of the parts of ``x @ weight.T`` to the residual stream, in place.

    ``program`` replaces the device's kernel, for ``sizes``; at most ``pairs`` pairs of it are
    launched.
    """
    sizes = sizes or PairedSizes.choose(gates=False)
    _multiply(x, weight, residual, parts, times, sizes, program, pairs)


def paired_gate_up(
    x: Tensor,
    gate_up_weight: Tensor,
    *,
    sizes: PairedSizes | None = None,
    program: Program | None = None,
    pairs: int | None = None,
) -> Tensor:
    """Compute ``silu(x @ gates.T) * (x @ ups.T)``, whose weights are ``[2 * outputs, inputs]``."""
    out = x.new_empty((x.shape[0], gate_up_weight.shape[0] // 2))
    sizes = sizes or PairedSizes.choose(gates=True)
    _multiply(x, gate_up_weight, out, 1, 1.0, sizes, program, pairs)
    return out


def _fits(x: Tensor, weight: Tensor, parts: int, sizes: PairedSizes) -> bool:
    outputs, inputs = weight.shape
    tiles = cdiv(x.shape[0], ROWS) * cdiv(outputs // (1 + sizes.gates), OUTPUTS)
    fit = (
        tiles >= _MIN_TILES
        and inputs % (parts * SIDE) == 0
        and is_tma_aligned(x)
        and is_tma_aligned(weight)
    )
    return fit and KERNEL.load(sizes, x.device) is not None


def _multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    parts: int,
    times: float,
    sizes: PairedSizes,
    program: Program | None,
    pairs: int | None,
) -> None:
    program = program or KERNEL.load(sizes, x.device)
    assert program is not None
    rows, outputs = out.shape
    most = pairs or num_multiprocessors(x.device) // 2
    pairs = min(most, cdiv(rows, 2 * ROWS) * cdiv(outputs, OUTPUTS))
    KERNEL.launch(
        program,
        2 * pairs,
        rows=matrix_tiles(x, ROWS),
        weights=matrix_tiles(weight, OUTPUTS // 2),
        out=matrix_tiles(out, ROWS // 2, OUTPUTS),
        outputs=outputs,
        num_rows=rows,
        parts=parts,
        tiles=x.shape[1] // parts // SIDE,
        pairs=pairs,
        scale=times,
    )
