"""Launching of GEMMs of many rows by pairs of programs, with the bits of few rows' GEMMs."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    TensorMap,
    is_tma_aligned,
    matrix_layout,
    matrix_map,
    num_multiprocessors,
)
from roseinfer.kernels.cuda.toolchain import compile_and_load, wgmma_overwrite_source
from roseinfer.kernels.runtime import cdiv
from roseinfer.kernels.traffic import notify_launch_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.tensor_maps import MatrixLayout
    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program

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
        """Threads of a program: two warpgroups multiply, and three threads of a third fetch, which
        releases registers."""
        return 3 * 128

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: a ring, the results, and barriers."""
        of_tile = (ROWS + OUTPUTS * (2 if self.gates else 1)) * SIDE * 2
        return self.stages * of_tile + ROWS * OUTPUTS * 2 + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"shared_bytes": self.shared_bytes}
        return {name.upper(): int(value) for name, value in named.items()}

    def source(self, *, with_machine: bool = True) -> str:
        """Return the kernel's source; without the machine's sources, others must replace them."""
        machine = toolchain.machine_sources("machine", "warpgroup", "pair") if with_machine else []
        if with_machine:
            machine += [wgmma_overwrite_source(OUTPUTS), toolchain.wgmma_accumulate_source(OUTPUTS)]
        return "\n".join(
            [*machine, *toolchain.shared_sources(), toolchain.source_part(__package__, "paired")]
        )


KERNEL = "multiply_in_pairs"
"""The kernel's name in the source."""
_MIN_TILES = 96
"""Smallest number of tiles of rows by outputs: with fewer, too many of a GPU's multiprocessors
idle."""


class PairedParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source; its size is a multiple of 64 bytes."""

    _fields_ = (
        ("rows", TensorMap),
        ("weights", TensorMap),
        ("out", TensorMap),
        *((name, ctypes.c_int) for name in ("outputs", "num_rows", "parts", "tiles", "pairs")),
        ("times", ctypes.c_float),
        ("unused", ctypes.c_ubyte * 40),
    )


def can_add_paired_gemm(residual: Tensor, x: Tensor, weight: Tensor, parts: int) -> bool:
    """Return True if ``add_paired_gemm`` is the fastest here; compile it then."""
    fit = is_tma_aligned(residual) and residual.shape[1] % SIDE == 0
    return fit and _fits(x, weight, parts, PairedSizes.choose(gates=False))


def can_pair_gate_up(x: Tensor, gate_up_weight: Tensor) -> bool:
    """Return True if ``paired_gate_up`` is the fastest here; compile it then."""
    fit = len(gate_up_weight) % (2 * SIDE) == 0
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
    out = x.new_empty((len(x), len(gate_up_weight) // 2))
    sizes = sizes or PairedSizes.choose(gates=True)
    _multiply(x, gate_up_weight, out, 1, 1.0, sizes, program, pairs)
    return out


def _fits(x: Tensor, weight: Tensor, parts: int, sizes: PairedSizes) -> bool:
    outputs, inputs = weight.shape
    tiles = cdiv(len(x), ROWS) * cdiv(outputs // (1 + sizes.gates), OUTPUTS)
    fit = (
        tiles >= _MIN_TILES
        and inputs % (parts * SIDE) == 0
        and all(is_tma_aligned(matrix) for matrix in (x, weight))
    )
    return fit and program_of(sizes, x.device) is not None


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
    program = program or program_of(sizes, x.device)
    assert program is not None
    pairs = pairs or num_multiprocessors(x.device) // 2
    places = matrix_layout(x), matrix_layout(weight), matrix_layout(out)
    params = _params(program.encode, *places, parts, times, pairs)
    with notify_launch_hooks(KERNEL, partial(_traffic, x, weight, out, 1 if sizes.gates else 2)):
        program.launch(params, 2 * params.pairs)


@lru_cache(1 << 12)
def _params(
    encode: Callable[..., object],
    x: MatrixLayout,
    weight: MatrixLayout,
    out: MatrixLayout,
    parts: int,
    times: float,
    most_pairs: int,
) -> PairedParams:
    """Return the parameters of a launch, from a cache.

    Building them takes the host longer than the launch takes the GPU. Activations reuse the
    addresses of earlier ones, and weights keep theirs, so the cache hits.
    """
    _, rows, outputs, _ = out
    _, _, inputs, _ = x
    return PairedParams(
        rows=matrix_map(encode, x, ROWS),
        weights=matrix_map(encode, weight, OUTPUTS // 2),
        out=matrix_map(encode, out, ROWS // 2, OUTPUTS),
        outputs=outputs,
        num_rows=rows,
        parts=parts,
        tiles=inputs // parts // SIDE,
        pairs=min(most_pairs, cdiv(rows, 2 * ROWS) * cdiv(outputs, OUTPUTS)),
        times=times,
    )


def _traffic(x: Tensor, weight: Tensor, out: Tensor, times: int) -> list[tuple[Tensor, int]]:
    """Count each tensor's bytes once, and those of ``out`` twice if the kernel adds to it."""
    return [(x, x.nbytes), (weight, weight.nbytes), (out, times * out.nbytes)]


def program_of(sizes: PairedSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return compile_and_load(sizes, KERNEL, device, "GEMMs of many rows run in torch")
