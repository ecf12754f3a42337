"""What kernels of several ranks add up rows through. This needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a kernel on one rank needs to add up rows with the same kernel on the others."""

    rank: int
    ranks: int
    together: int
    """Numbers that a word carries: two of 16 bits, as ranks round theirs, or one."""
    most_rows: int
    """A launch adds up at most so many rows. Each has a program, which waits for one on every other
    GPU. All programs of a launch find room at once, so none waits for one that cannot begin."""
    inbox: Tensor
    """64-bit words, ``[2, ranks, most_rows, of a row]``: what each rank has sent to this one."""
    inboxes: Tensor
    """The address of every rank's inbox."""
    rounds: Tensor
    """How often each row was added up. A launch counts on by itself, so it may be in a graph."""
    gone: Tensor
    """1 when a rank has ended, and nobody shall wait for it any more."""

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel takes as its arguments of the same names."""
        return self.inbox, self.inboxes, self.rounds, self.gone

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """What a kernel is compiled for, as ``ROWS``, ``RANK``, ``RANKS`` and ``TOGETHER``."""
        return self.most_rows, self.rank, self.ranks, self.together
