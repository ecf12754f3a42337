"""The blocks of a cache, by groups of layers: which are held, given back, free, or needed.

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
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.oracle.pages import Table

AT_ONCE, NEXT_TRY = "at once", "next try"
Window = int | None
"""The window of a layer, which names its group; None where a layer attends to all."""


def first_live(window: Window, length: int) -> int:
    """Return the first position that may be attended to once so many tokens are stored."""
    return max(0, length - window + 1) if window else 0


@dataclass(slots=True)
class Windows:
    """The window of every layer, and how much each sequence gave back in each group."""

    of_layer: Sequence[Window] = ()
    """None of them if no layer has a window: all layers are one group then."""
    shared_pool: bool = False
    """All groups take their blocks from one pool, in which a block belongs to one of them."""
    gives_back: str = AT_ONCE
    """As ``WindowTraits.gives_back``."""
    given_back: dict[Window, Counter[int]] = field(init=False)
    """By group and sequence: how many of its first pages."""
    tables: dict[Window, dict[int, Table]] = field(init=False)
    """By group and sequence: its blocks, as far as a cache that knows texts showed them."""
    left: int = field(init=False, default=0)
    """How many pages were given back since that was last taken."""

    def __post_init__(self) -> None:
        self.given_back = {window: Counter() for window in self.of_layer or (None,)}
        self.tables = {window: {} for window in self.given_back}

    def of(self, layer: int) -> Window:
        """Return the window of a layer."""
        return self.of_layer[layer] if self.of_layer else None

    @property
    def sizes(self) -> list[int]:
        """The different windows that layers have."""
        return [window for window in self.given_back if window]

    @property
    def groups(self) -> list[int]:
        """List layers, one of each group."""
        return [self.of_layer.index(window) for window in self.given_back] if self.of_layer else [0]

    def pool_of(self, layer: int) -> list[int]:
        """List this layer, and one of each other group that takes blocks from the same pool."""
        own = self.of(layer)
        others = [window for window in self.given_back if self.shared_pool and window != own]
        return [layer, *map(self.of_layer.index, others)]

    def slide(self, seq: int, length: int, block_size: int) -> None:
        """Give back the pages of a sequence of this length that are not live."""
        for window, given in self.given_back.items():
            gone = first_live(window, length) // block_size
            self.left += max(0, gone - given[seq])
            given[seq] = max(given[seq], gone)

    def adopt(self, window: Window, tables: Mapping[int, Table]) -> None:
        """Take from the tables of a group what is shared there, and what no text's end needed."""
        self.tables[window] = dict(tables)
        for seq, table in tables.items():
            gone = next((at for at, block in enumerate(table) if block is not None), len(table))
            self.given_back[window][seq] = gone

    def take_left(self) -> int:
        left, self.left = self.left, 0
        return left

    def fork(self, parent: int, child: int) -> None:
        for given in self.given_back.values():
            given[child] = given[parent]

    def cut(self, seq: int, pages: int) -> None:
        for given in self.given_back.values():
            given[seq] = min(given[seq], pages)

    def forget(self, seq: int) -> None:
        for given in self.given_back.values():
            del given[seq]
        for tables in self.tables.values():
            tables.pop(seq, None)


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
