"""Launching products of many rows by pairs of programs, which have the bits of those of few."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda import toolchain
from roseinfer.kernels.cuda.tensor_maps import (
    SIDE,
    Map,
    lies_well,
    map_of,
    multiprocessors,
    place_of,
)
from roseinfer.kernels.cuda.toolchain import loaded, product
from roseinfer.kernels.runtime import num_tiles
from roseinfer.kernels.traffic import announced

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from roseinfer.kernels.cuda.tensor_maps import Place
    from roseinfer.kernels.cuda.toolchain import GpuProgram, Program

# What products of many rows are compiled for, and the source of their kernel for that.


ROWS = 128
"""Of a program: two warpgroups multiply 64 each."""
OUTPUTS = 128
"""Of a pair of programs: with more, a thread has no room for two sums of each."""
_STAGES = 6
_STAGES_WITH_GATES = 4
"""They leave room for no more."""


@dataclass(frozen=True, slots=True)
class PairedSizes:
    """What the compiler is told, under these names in capitals."""

    gates: bool
    """Of two strips of outputs the first gates the second."""
    stages: int
    """Tiles of rows and of weights that have room at a time."""

    @classmethod
    def chosen(cls, *, gates: bool) -> PairedSizes:
        return cls(gates, _STAGES_WITH_GATES if gates else _STAGES)

    @property
    def threads(self) -> int:
        """Two warpgroups multiply. A third, of which three threads fetch, gives registers away."""
        return 3 * 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: a ring, what comes out, and barriers."""
        of_tile = (ROWS + OUTPUTS * (2 if self.gates else 1)) * SIDE * 2
        return self.stages * of_tile + ROWS * OUTPUTS * 2 + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"shared_bytes": self.shared_bytes}
        return {name.upper(): int(value) for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = toolchain.machine("machine", "warpgroup", "pair") if machine else []
        if machine:
            own += [product(OUTPUTS), toolchain.add_product(OUTPUTS)]
        return "\n".join([*own, *toolchain.shared(), toolchain.part(__package__, "paired")])


KERNEL = "multiply_in_pairs"
"""Its name in the source."""
_FEWEST_TILES = 96
"""Of rows by outputs: with fewer, too many of a GPU's multiprocessors have none."""


class PairedParams(ctypes.Structure):
    """The kernel's argument, ``Params`` in its source, which ends at a multiple of 64 bytes."""

    _fields_ = (
        ("rows", Map),
        ("weights", Map),
        ("out", Map),
        *((name, ctypes.c_int) for name in ("outputs", "num_rows", "parts", "tiles", "pairs")),
        ("times", ctypes.c_float),
        ("unused", ctypes.c_ubyte * 40),
    )


def adds_product(residual: Tensor, x: Tensor, weight: Tensor, parts: int) -> bool:
    """Tell if ``add_product`` is the fastest here, and compile it then."""
    fit = lies_well(residual) and residual.shape[1] % SIDE == 0
    return fit and _fits(x, weight, parts, PairedSizes.chosen(gates=False))


def gates_product(x: Tensor, gates_and_ups: Tensor) -> bool:
    """Tell if ``gate_product`` is the fastest here, and compile it then."""
    fit = len(gates_and_ups) % (2 * SIDE) == 0
    return fit and _fits(x, gates_and_ups, 1, PairedSizes.chosen(gates=True))


def add_product(
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

    ``program`` is one that is not that of the device, for such ``sizes``, and ``pairs`` how many of
    it are launched at most.
    """
    sizes = sizes or PairedSizes.chosen(gates=False)
    _multiply(x, weight, residual, parts, times, sizes, program, pairs)


def gate_product(
    x: Tensor,
    gates_and_ups: Tensor,
    *,
    sizes: PairedSizes | None = None,
    program: Program | None = None,
    pairs: int | None = None,
) -> Tensor:
    """Compute ``silu(x @ gates.T) * (x @ ups.T)``, whose weights are ``[2 * outputs, inputs]``."""
    out = x.new_empty((len(x), len(gates_and_ups) // 2))
    sizes = sizes or PairedSizes.chosen(gates=True)
    _multiply(x, gates_and_ups, out, 1, 1.0, sizes, program, pairs)
    return out


def _fits(x: Tensor, weight: Tensor, parts: int, sizes: PairedSizes) -> bool:
    outputs, inputs = weight.shape
    tiles = num_tiles(len(x), ROWS) * num_tiles(outputs // (1 + sizes.gates), OUTPUTS)
    fit = (
        tiles >= _FEWEST_TILES
        and inputs % (parts * SIDE) == 0
        and all(lies_well(matrix) for matrix in (x, weight))
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
    pairs = pairs or multiprocessors(x.device) // 2
    places = place_of(x), place_of(weight), place_of(out)
    params = _params(program.encode, *places, parts, times, pairs)
    with announced(KERNEL, partial(_moved, x, weight, out, 1 if sizes.gates else 2)):
        program.launch(params, 2 * params.pairs)


@lru_cache(1 << 12)
def _params(
    encode: Callable[..., object],
    x: Place,
    weight: Place,
    out: Place,
    parts: int,
    times: float,
    most_pairs: int,
) -> PairedParams:
    """Return what a launch is given. The host would take longer than the GPU to make it each time.

    Activations lie where others did before, and weights stay.
    """
    _, rows, outputs, _ = out
    _, _, inputs, _ = x
    return PairedParams(
        rows=map_of(encode, x, ROWS),
        weights=map_of(encode, weight, OUTPUTS // 2),
        out=map_of(encode, out, ROWS // 2, OUTPUTS),
        outputs=outputs,
        num_rows=rows,
        parts=parts,
        tiles=inputs // parts // SIDE,
        pairs=min(most_pairs, num_tiles(rows, 2 * ROWS) * num_tiles(outputs, OUTPUTS)),
        times=times,
    )


def _moved(x: Tensor, weight: Tensor, out: Tensor, times: int) -> list[tuple[Tensor, int]]:
    """Count all once, and what is added to twice."""
    return [(x, x.nbytes), (weight, weight.nbytes), (out, times * out.nbytes)]


def program_of(sizes: PairedSizes, device: torch.device) -> GpuProgram | None:
    """Return the kernel, or None where it cannot be compiled."""
    return loaded(sizes, KERNEL, device, "products of many rows are torch's")
