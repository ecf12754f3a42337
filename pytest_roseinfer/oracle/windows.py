"""The windows of layers: what is live of a sequence, and the blocks that it gave back.

In a layer of window W a token attends to itself and the W - 1 before it, as vLLM and transformers
count. So the last W - 1 of the stored tokens are live: the next token may attend to them, and
nothing that comes later to any before them. Layers of one window form a group, and have the same
blocks; a block is given back in a group when none of its tokens is live there or will be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.oracle.pages import Table

WINDOW_POOLS = ("own", "shared")
AT_ONCE, NEXT_WRITE, NEXT_TRY = WINDOW_GIVES_BACK = ("at once", "next write", "next try")
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
    """As ``KVCacheAdapter.window_gives_back``."""
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
