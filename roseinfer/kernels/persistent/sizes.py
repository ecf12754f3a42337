"""The sizes that the kernel of a whole step is compiled for, and its source with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE

_FILES = ("sizes", "producer", "words", "consumer", "attention", "phases", "step")
"""The source's parts, which follow on each other."""
ROWS = 8
"""Outputs of a tile of weights."""
_LEAST_CHUNK = 128
"""Inputs of a tile. With fewer, tiles would be too small to be asked for as fast as they come."""
_TILE_T = 64
_WARPS = 8


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the compiler is told, under these names in capitals."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    """Of a head."""
    mlp: int
    vocab: int
    turn: int
    """How many numbers of a head are rotated."""
    block_size: int
    out_parts: int
    """Parts in which the inputs of attention's output are added up."""
    down_parts: int
    norm_warps: int
    """Warps of Triton's norm kernel, which decide in what order it adds up."""
    programs: int
    normed: bool = False
    """Queries and keys are normed, each head by itself."""
    stages: int = 0
    """Tiles of the ring."""
    in_flight: int = 4
    """The most tiles that a program has asked for and not received."""
    most_chunk: int = 1024
    """The most inputs of a tile of weights."""

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def most_sums(self) -> int:
        """Products of a phase that a program keeps in shared memory."""
        rows = [(self.qkv, 1, 1), (self.mlp, 2, 1)]
        rows += [(self.width, 1, parts) for parts in (self.out_parts, self.down_parts)]
        return max(
            ROWS * strips * parts * -(-(count // self.programs + 1) // ROWS)
            for count, strips, parts in rows
        )

    @property
    def most_inputs(self) -> int:
        return max(self.width, self.heads * self.dim, self.mlp)

    @property
    def chunks(self) -> list[int]:
        """Inputs of the tiles of each kind of product; 0 where they cannot be cut."""
        products = [
            (self.width, 1),
            (self.heads * self.dim, self.out_parts),
            (self.mlp, self.down_parts),
        ]
        return [
            self._chunk(inputs // parts) if inputs % parts == 0 else 0 for inputs, parts in products
        ]

    def _chunk(self, inputs: int) -> int:
        """Return the largest fit number of inputs of a tile, or 0 where there is none."""
        fit = range(self.most_chunk, _LEAST_CHUNK - 1, -SIDE)
        return next((chunk for chunk in fit if inputs % chunk == 0), 0)

    def room(self) -> int:
        """Return the bytes of shared memory that a program needs beside its ring, or a few more."""
        tiles = 16 * (self.dim + 8) + 16 * (_TILE_T + 8) + 2 * self.dim + self.most_inputs
        return 2 * tiles + 4 * (self.most_sums + 16 * _WARPS + 32 + 17) + 512

    def tile(self) -> int:
        """Return the bytes of the largest tile."""
        return ROWS * 2 * max(self.chunks)

    def slot(self) -> int:
        """Return the bytes of a tile and of the barriers that go with it."""
        return self.tile() + 16

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a program is given."""
        return self.room() + self.stages * self.slot()

    def defines(self) -> dict[str, int]:
        reckoned = ("most_sums", "most_inputs", "shared_bytes")
        named = asdict(self) | {name: getattr(self, name) for name in reckoned}
        return {name.upper(): int(value) for name, value in named.items()}


@cache
def source(*, machine: bool = True) -> str:
    """Return the kernel's source; without the machine's part, another must stand in for it."""
    parts = sources.machine("machine") if machine else []
    return "\n".join(
        [*parts, *sources.shared(), *(sources.part(__package__, name) for name in _FILES)]
    )
