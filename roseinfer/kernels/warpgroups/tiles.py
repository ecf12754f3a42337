"""How products of a few rows are cut into tiles, and the source of the kernel for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.warpgroups.instructions import add_product

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
        own = sources.machine("machine", "warpgroup") if machine else []
        if machine:
            own.append(add_product(self.columns))
        return "\n".join([*own, *sources.shared(), sources.part(__package__, "streamed")])


@cache
def tiles_for(rows: int, strips: int) -> Tiles:
    """Choose the tiles of a product: the fastest tried on an H200."""
    padded = max(_FEWEST_ROWS, 1 << (rows - 1).bit_length())
    groups = 1 if padded < _FEWEST_FOR_TWO else 2
    one = Tiles(padded // groups, groups, strips, DEEPEST // strips, 1, 1)
    stages = _ROOM // one.stage_bytes
    in_flight = min(stages, _IN_FLIGHT // one.weights_bytes)
    return Tiles(one.columns, groups, strips, one.depth, stages, in_flight)
