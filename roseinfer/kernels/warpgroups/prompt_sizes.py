"""What the kernel that attends for prompts is compiled for, and its source for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.warpgroups.instructions import add_product, add_product_of_held, product

ROWS = 128
"""Of a program: tokens by the query heads that share a KV head, rounded up to a power of two."""
TILE_TOKENS = 64
"""Tokens that are looked at together."""
_FILES = ("prompt_items", "prompt_fetching", "prompt_attending", "prompts")
_DIMS = (64, 128)
_LEAST_BLOCK = 8
"""Tokens: fewer do not begin where the copy engine's order of pieces does."""
_MOST_GROUP = 16
_STAGES = 4
_STRIP = TILE_TOKENS * SIDE * 2
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
        longer, shorter = max(self.block_size, TILE_TOKENS), min(self.block_size, TILE_TOKENS)
        return (
            self.dim in _DIMS
            and self.group <= _MOST_GROUP
            and self.block_size >= _LEAST_BLOCK
            and longer % shorter == 0
        )

    @property
    def threads(self) -> int:
        """Two warpgroups compute, and of a third, which gives registers away, a thread fetches."""
        return 3 * 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: queries, two rings, and barriers."""
        strips = self.dim // SIDE
        of_rings = _STAGES * (strips + strips + 1)
        return (ROWS // TILE_TOKENS * strips + of_rings) * _STRIP + 1024

    def defines(self) -> dict[str, int]:
        named = asdict(self) | {"stages": _STAGES, "shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = sources.machine("machine", "warpgroup") if machine else []
        if machine:
            own += [product(TILE_TOKENS), add_product(TILE_TOKENS)]
            own.append(add_product_of_held(self.dim + _ONES))
        parts = [sources.part(__package__, name) for name in _FILES]
        return "\n".join([*own, *sources.shared(), *parts])
