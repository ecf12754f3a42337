"""The windows of layers: what is live of a sequence, and the blocks that it gave back.

In a layer of window W a token attends to itself and the W - 1 before it, as vLLM and transformers
count. So the last W - 1 of the stored tokens are live: the next token may attend to them, and
nothing that comes later to any before them. Layers of one window form a group, and have the same
blocks; a block is given back in a group when none of its tokens is live there or will be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

WINDOW_POOLS = ("own", "shared")
WINDOW_GIVES_BACK = ("at once", "next write")
Window = int | None
"""The window of a layer, which names its group; None where a layer attends to all."""


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
    def unwritten(self, seq: int, /) -> int: ...
    def shares(self, parent: int, at: int, /) -> bool: ...


def first_live(window: Window, length: int) -> int:
    """Return the first position that may be attended to once so many tokens are stored."""
    return max(0, length - window + 1) if window else 0


@dataclass(slots=True)
class Windows:
    """The window of every layer, and how much each sequence gave back in each group."""

    of_layer: Sequence[Window]
    shared_pool: bool = False
    """All groups take their blocks from one pool, in which a block belongs to one of them."""
    at_once: bool = True
    """A write gives back what it moved out of a window; else the sequence's next one does."""
    given_back: dict[Window, Counter[int]] = field(init=False)
    """By group and sequence: how many of its first pages."""
    left: int = field(init=False, default=0)
    """How many pages were given back since that was last taken."""

    def __post_init__(self) -> None:
        self.given_back = {window: Counter() for window in self.of_layer}

    def pool_of(self, layer: int) -> list[int]:
        """List this layer, and one of each other group that takes blocks from the same pool."""
        own = self.of_layer[layer]
        others = [window for window in self.given_back if self.shared_pool and window != own]
        return [layer, *map(self.of_layer.index, others)]

    # ---------------------------------------------------------------- what steps change

    def slide(self, stored: Stored, seqs: Collection[int]) -> None:
        """Give back the pages of these sequences that are not live by now."""
        for window, given in self.given_back.items():
            for seq in seqs:
                gone = first_live(window, stored.length(seq)) // stored.block_size
                self.left += max(0, gone - given[seq])
                given[seq] = max(given[seq], gone)

    def take_left(self) -> int:
        left, self.left = self.left, 0
        return left

    def slide_written(self, stored: Stored, seqs: Collection[int]) -> None:
        """Give back at once, where a cache does so; room that was reserved is kept till then."""
        if self.at_once:
            self.slide(stored, [seq for seq in seqs if not stored.unwritten(seq)])

    def fork(self, parent: int, child: int) -> None:
        for given in self.given_back.values():
            given[child] = given[parent]

    def cut(self, seq: int, pages: int) -> None:
        for given in self.given_back.values():
            given[seq] = min(given[seq], pages)

    def forget(self, seq: int) -> None:
        for given in self.given_back.values():
            del given[seq]

    # -------------------------------------------------------------------- what has room

    def room(self, stored: Stored) -> dict[Window, int]:
        """Count the free blocks of each group; of all, by the name None, in a shared pool."""
        return dict(_Room(stored, self).free)

    def room_words(self, stored: Stored) -> str:
        if self.shared_pool:
            return f"{self.room(stored)[None]} blocks free for all windows"
        each = (f"{free} with window {window}" for window, free in self.room(stored).items())
        return f"blocks free: {', '.join(each)}"

    def fits(self, stored: Stored, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if these rows find room one after the other.

        What a row gives back makes room for its own blocks, and for those of rows behind it.
        """
        room = _Room(stored, self)
        return all(room.append(*row) for row in rows)

    def fork_fits(self, stored: Stored, parent: int) -> bool:
        return _Room(stored, self).fork(parent)

    def truncate_fits(self, stored: Stored, rows: Sequence[tuple[int, int]]) -> bool:
        room = _Room(stored, self)
        return all(room.truncate(*row) for row in rows)


class _Room:
    """Counts the blocks that steps take and give back, which are not done.

    Every step returns True if there were blocks enough for it.
    """

    def __init__(self, stored: Stored, windows: Windows) -> None:
        self.stored = stored
        self.windows = windows
        self.holders = Counter(
            (window, id(page))
            for window, given in windows.given_back.items()
            for seq, pages in stored.sequences.items()
            for page in pages[given[seq] :]
        )
        pools = dict.fromkeys(map(self._pool, windows.given_back), stored.capacity)
        self.free = Counter(pools)
        self.free.subtract(self._pool(window) for window, _ in self.holders)

    def _pool(self, window: Window) -> Window:
        return None if self.windows.shared_pool else window

    def _take(self, window: Window, blocks: int) -> None:
        self.free[self._pool(window)] -= blocks

    def _drop(self, window: Window, pages: Sequence[object]) -> None:
        for page in pages:
            self.holders[window, id(page)] -= 1
            self.free[self._pool(window)] += not self.holders[window, id(page)]

    def _own(self, window: Window, page: object) -> None:
        """Copy a page for a sequence that is not alone on it."""
        if self.holders[window, id(page)] > 1:
            self._drop(window, [page])
            self._take(window, 1)

    def _is_enough(self) -> bool:
        return min(self.free.values()) >= 0

    def append(self, seq: int, count: int) -> bool:
        pages, size = self.stored.sequences.get(seq, ()), self.stored.block_size
        length = self.stored.length(seq)
        for window, given in self.windows.given_back.items():
            self._drop(window, pages[given[seq] : first_live(window, length) // size])
        for window in self.windows.given_back:
            if length % size:
                self._own(window, pages[-1])
            self._take(window, -(-(length + count) // size) - len(pages))
        return self._is_enough()

    def fork(self, parent: int) -> bool:
        for window, given in self.windows.given_back.items():
            held = range(given[parent], len(self.stored.sequences[parent]))
            self._take(window, sum(not self.stored.shares(parent, at) for at in held))
        return self._is_enough()

    def truncate(self, seq: int, length: int) -> bool:
        pages, size = self.stored.sequences[seq], self.stored.block_size
        kept = -(-length // size)
        cut = length % size and length < self.stored.length(seq)
        for window, given in self.windows.given_back.items():
            self._drop(window, pages[max(kept, given[seq]) :])
            if cut and self.stored.truncate_copies and kept > given[seq]:
                self._own(window, pages[kept - 1])
        return self._is_enough()
