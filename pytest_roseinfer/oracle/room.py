"""Counts the blocks that steps would take and give back, before they are done."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from pytest_roseinfer.oracle.windows import first_live

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.oracle.windows import Window


class Stored(Protocol):
    """What the oracle knows of a cache's sequences."""

    @property
    def block_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def truncate_copies(self) -> bool: ...
    @property
    def sequences(self) -> Mapping[int, Sequence[object]]:
        """The pages of each sequence, those included that were given back."""

    def length(self, seq: int, /) -> int: ...
    def keeps(self, seq: int, at: int, /) -> bool: ...
    def shares(self, parent: int, at: int, /) -> bool: ...
    def block(self, window: Window, seq: int, at: int, /) -> object: ...


class Room:
    """The blocks that are free in each pool, and the holders of the others.

    Every step returns True if there were blocks enough for it.
    """

    def __init__(
        self, stored: Stored, given_back: Mapping[Window, Mapping[int, int]], *, shared_pool: bool
    ) -> None:
        """Take groups of layers, each with how many of its first pages a sequence gave back."""
        self.stored = stored
        self.given_back = given_back
        self.shared_pool = shared_pool
        self.holders = Counter(
            (window, block)
            for window, given in given_back.items()
            for seq in stored.sequences
            for block in self._blocks(window, seq)[given[seq] :]
        )
        self.free = Counter(dict.fromkeys(map(self._pool, given_back), stored.capacity))
        """By group; by the name None where all groups share one pool."""
        self.free.subtract(self._pool(window) for window, _ in self.holders)

    def holders_of(self, seq: int) -> Iterator[list[int]]:
        """Yield for each group how many hold each of a sequence's blocks."""
        for window, given in self.given_back.items():
            own = self._blocks(window, seq)[given[seq] :]
            yield [self.holders[window, block] for block in own]

    def _pool(self, window: Window) -> Window:
        return None if self.shared_pool else window

    def _blocks(self, window: Window, seq: int) -> list[object]:
        pages = self.stored.sequences.get(seq, ())
        return [self.stored.block(window, seq, at) for at in range(len(pages))]

    def _take(self, window: Window, blocks: int) -> None:
        self.free[self._pool(window)] -= blocks

    def _drop(self, window: Window, blocks: Sequence[object]) -> None:
        for block in blocks:
            self.holders[window, block] -= 1
            self.free[self._pool(window)] += not self.holders[window, block]

    def _own(self, window: Window, block: object, *, found: bool = False) -> None:
        """Copy a block for a sequence that is not alone on it, or that found it."""
        if found or self.holders[window, block] > 1:
            self.holders[window, block] -= 1  # it is not free before the copy is made
            self._take(window, 1)

    def _is_enough(self) -> bool:
        return min(self.free.values()) >= 0

    def append(self, seq: int, count: int) -> bool:
        size, length = self.stored.block_size, self.stored.length(seq)
        held = {window: self._blocks(window, seq) for window in self.given_back}
        for window, given in self.given_back.items():
            self._drop(window, held[window][given[seq] : first_live(window, length) // size])
        for window, blocks in held.items():
            if length % size:
                found = self.stored.keeps(seq, len(blocks) - 1)
                self._own(window, blocks[-1], found=found)
            self._take(window, -(-(length + count) // size) - len(blocks))
        return self._is_enough()

    def fork(self, parent: int) -> bool:
        for window, given in self.given_back.items():
            held = range(given[parent], len(self.stored.sequences[parent]))
            self._take(window, sum(not self.stored.shares(parent, at) for at in held))
        return self._is_enough()

    def truncate(self, seq: int, length: int) -> bool:
        size = self.stored.block_size
        kept = -(-length // size)
        cut = length % size and length < self.stored.length(seq)
        for window, given in self.given_back.items():
            blocks = self._blocks(window, seq)
            self._drop(window, blocks[max(kept, given[seq]) :])
            if cut and self.stored.truncate_copies and kept > given[seq]:
                self._own(window, blocks[kept - 1], found=self.stored.keeps(seq, kept - 1))
        return self._is_enough()
