"""What the kernel that attends from single rows is compiled for, and its source for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from roseinfer.kernels.cuda import sources
from roseinfer.kernels.cuda.tensor_maps import SIDE
from roseinfer.kernels.warpgroups.caches import STRIP, sizes_fit

_MULTIPROCESSOR_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""
_REST = 2 << 10
"""Barriers and scores of the new token, and what is left of the last 1,024 bytes."""
_PROGRAM_BYTES = 1 << 10
"""Of which every program takes so many besides its own."""
_WARPS_AND_PLACES = ((4, 4), (4, 2), (3, 2), (2, 2), (1, 3))
"""Those for few programs first."""
_IN_TURN = 3
"""Which of them is for programs that come one after the other."""
_FILES = ("row_tiles", "row_attending")


@dataclass(frozen=True, slots=True)
class RowSizes:
    """What the compiler is told, under these names in capitals."""

    dim: int
    """Numbers of a head."""
    group: int
    """Query heads that share a KV head."""
    block_size: int
    warps: int
    places: int
    """Of a warp, for keys or values of a tile."""

    @classmethod
    def chosen(cls, dim: int, group: int, block_size: int, programs: int) -> RowSizes:
        """Return the sizes that are the fastest for so many programs on a multiprocessor.

        All programs are there at once, with as many places as they have room for. If they have
        none, they come one after the other.
        """
        own = [cls(dim, group, block_size, *each) for each in _WARPS_AND_PLACES]
        room = _MULTIPROCESSOR_BYTES // programs - _PROGRAM_BYTES
        return next((each for each in own if each.shared_bytes <= room), own[_IN_TURN])

    def fit(self) -> bool:
        """Tell if the kernel can be compiled for them."""
        return sizes_fit(self.dim, self.group, self.block_size)

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a program: tiles, what is seen of parts, the new token, barriers."""
        of_warp = self.places * self.dim // SIDE * STRIP + self.group * (self.dim + 6) * 4
        heads = (16 if self.group > 8 else 8) + 2
        return self.warps * of_warp + heads * (self.dim + 8) * 2 + _REST

    def defines(self) -> dict[str, int]:
        named = {**asdict(self), "shared_bytes": self.shared_bytes}
        return {name.upper(): value for name, value in named.items()}

    def source(self, *, machine: bool = True) -> str:
        """Return the kernel's source; without the machine's part, another must stand in for it."""
        own = sources.machine("machine", "warpgroup") if machine else []
        parts = [sources.part(__package__, name) for name in _FILES]
        return "\n".join([*own, *sources.shared(), *parts])
