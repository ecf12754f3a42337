"""All-reduce buffers through which kernels of several ranks add up rows. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AllReduceBuffers:
    """One rank's buffers for adding up rows with the same kernel on the other ranks."""

    rank: int
    ranks: int
    together: int
    """Values per word: two of 16 bits, as ranks round theirs, or one."""
    max_rows: int
    """Largest number of rows that a launch adds up. Each row has a program, which waits for
    the same row's program on every other GPU. All programs of a launch are resident at once, so
    none waits for one that cannot start."""
    inbox: Tensor
    """64-bit words, ``[2, ranks, max_rows, words of a row]``, received from each rank."""
    inboxes: Tensor
    """Addresses of every rank's inbox."""
    rounds: Tensor
    """All-reduces so far of each row. A launch increments them itself, so it may be in a graph."""
    gone: Tensor
    """1 when a rank has exited, after which no kernel waits for it."""

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of a kernel for its parameters of the same names."""
        return self.inbox, self.inboxes, self.rounds, self.gone

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """Compile-time arguments of a kernel: ``ROWS``, ``RANK``, ``RANKS`` and ``TOGETHER``."""
        return self.max_rows, self.rank, self.ranks, self.together
