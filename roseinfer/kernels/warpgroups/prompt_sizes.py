"""What the kernel that attends for prompts is compiled for, and its source for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.warpgroups.caches import STRIP, TILE_TOKENS, sizes_fit
from roseinfer.kernels.warpgroups.instructions import add_product, add_product_of_held, product

_ROWS = 64
"""Of a warpgroup: tokens by the query heads that share a KV head, rounded up to a power of two."""
_FILES = ("prompt_items", "prompt_fetching", "prompt_attending", "prompts")
_REGISTERS = {2: 240, 3: 160}
"""Of a thread that computes, by how many warpgroups do. Those that fetch leave it so many."""
_STAGES = 4
_ONES = 8
"""Columns of ones behind the values."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """What the compiler is told, under these names in capitals."""

    dim: int
    """Numbers of a head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int

    def fit(self) -> bool:
        """Tell if the kernel can be compiled for them."""
        return sizes_fit(self.dim, self.group, self.block_size)

    @property
    def groups(self) -> int:
        """Count the warpgroups that compute: as many as have room for what their threads hold."""
        return 3 if self.dim == SIDE else 2

    @property
    def tokens(self) -> int:
        """Return how many tokens a program takes."""
        return self.groups * _ROWS >> (self.group - 1).bit_length()

    @property
    def threads(self) -> int:
        """One more warpgroup, which gives registers away, has a thread that fetches."""
        return (self.groups + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: queries of two items, two rings, and barriers."""
        strips = self.dim // SIDE
        of_rings = _STAGES * (strips + strips + 1)
        return (2 * self.groups * strips + of_rings) * STRIP + 1024

    def defines(self) -> dict[str, int]:
        told = {
            "groups": self.groups,
            "registers": _REGISTERS[self.groups],
            "stages": _STAGES,
            "shared_bytes": self.shared_bytes,
        }
        named = asdict(self) | told
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = sources.machine("machine", "warpgroup") if machine else []
        if machine:
            own += [product(TILE_TOKENS), add_product(TILE_TOKENS)]
            own.append(add_product_of_held(self.dim + _ONES))
        parts = [sources.part(__package__, name) for name in _FILES]
        return "\n".join([*own, *sources.shared(), *parts])
