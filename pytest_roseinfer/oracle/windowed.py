"""The oracle of a cache whose layers have windows, which gives back what has left them.

Its pages are those of all layers alike. How many of its first pages a sequence gave back is known
for each window, so room is counted group by group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.room import Room
from pytest_roseinfer.oracle.windows import AT_ONCE, NEXT_TRY, Windows, first_live

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from pytest_roseinfer.oracle.declares import Declares, Shape
    from pytest_roseinfer.oracle.pages import Table
    from pytest_roseinfer.oracle.texts import Branch
    from pytest_roseinfer.oracle.windows import Window


@dataclass(kw_only=True)
class WindowedOracle(Oracle):
    windows: Windows

    @classmethod
    def of(
        cls, adapter: Declares, spec: Shape, branches: tuple[Branch, ...] = (), **own: Any
    ) -> Self:
        shared = adapter.window_pools == "shared"
        windows = Windows(spec.windows, shared, adapter.window_gives_back)
        return super().of(adapter, spec, branches, windows=windows, **own)

    @property
    def window_sizes(self) -> list[int]:
        return [window for window in self.windows.given_back if window]

    def first_live(self, seq: int, layer: int) -> int:
        return first_live(self.windows.of_layer[layer], self.length(seq))

    def given_back(self, seq: int, layer: int) -> int:
        return self.windows.given_back[self.windows.of_layer[layer]][seq]

    def take_left(self) -> int:
        return self.windows.take_left()

    @property
    def groups(self) -> list[int]:
        return [self.windows.of_layer.index(window) for window in self.windows.given_back]

    def adopt_sharing(self, tables_of: Callable[[int], Mapping[int, Table]]) -> None:
        """Note what each group shares: pages are those of all groups, so none is shared."""
        for layer in self.groups:
            self.windows.adopt(self.windows.of_layer[layer], tables_of(layer))

    def block(self, window: Window, seq: int, at: int) -> object:
        table = self.windows.tables[window].get(seq, ())
        return table[at] if at < len(table) else super().block(window, seq, at)

    def pool_of(self, layer: int) -> list[int]:
        return self.windows.pool_of(layer)

    def blocks(self) -> Room:
        return Room(self, self.windows.given_back, shared_pool=self.windows.shared_pool)

    def pages_free(self) -> int:
        return min(self.blocks().free.values())

    def free_in(self, layer: int) -> int:
        shared, own = self.windows.shared_pool, self.windows.of_layer[layer]
        return self.blocks().free[None if shared else own]

    def room(self, rows: Sequence[tuple[int, int]]) -> str:  # noqa: ARG002
        free = self.blocks().free
        if self.windows.shared_pool:
            return f"{free[None]} blocks free for all windows"
        each = (f"{blocks} with window {window}" for window, blocks in free.items())
        return f"blocks free: {', '.join(each)}"

    def fits(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if these rows find room one after the other.

        What a row gives back makes room for its own blocks, and for those of rows behind it.
        """
        blocks = self.blocks()
        return all(blocks.append(*row) for row in rows)

    def append(self, rows: Sequence[tuple[int, int]], tokens: Sequence[int]) -> None:
        for seq, _ in rows:
            self._slide(seq)
        super().append(rows, tokens)

    def slide_written(self, rows: Sequence[tuple[int, int]]) -> None:
        """Give back at once, where a cache does so; room that was reserved is kept till then."""
        for seq, _ in rows:
            if self.windows.gives_back == AT_ONCE and not self.unwritten(seq):
                self._slide(seq)

    def try_in_vain(self, seq: int) -> None:
        if self.windows.gives_back == NEXT_TRY and seq in self.sequences:
            self._slide(seq)

    def _slide(self, seq: int) -> None:
        self.windows.slide(seq, self.length(seq), self.block_size)

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self.windows.fork(parent, child)

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self.windows.cut(seq, -(-length // self.block_size))

    def give_up(self, seq: int) -> None:
        super().give_up(seq)
        self.windows.forget(seq)


ORACLES: dict[bool, type[Oracle]] = {False: Oracle, True: WindowedOracle}
"""The kind of oracle that a cache has, by whether its layers have windows."""
