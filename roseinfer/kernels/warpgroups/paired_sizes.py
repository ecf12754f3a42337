"""What products of many rows are compiled for, and the source of their kernel for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.warpgroups.instructions import add_product, product

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
        own = sources.machine("machine", "warpgroup", "pair") if machine else []
        if machine:
            own += [product(OUTPUTS), add_product(OUTPUTS)]
        return "\n".join([*own, *sources.shared(), sources.part(__package__, "paired")])
