"""Block pool of one group of layers: refcounts, token counts and free blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import BadBlock, BadRefcount, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCRATCH = 0
"""Index of the scratch block, which no sequence ever owns; padding is written to it."""


@dataclass(slots=True)
class KVBlockInfo:
    """Record of one block, changed in place for as long as the pool lives."""

    layer: int
    """First layer of the group the block belongs to; 0 where groups share a pool."""
    block_index: int
    """Index within the group's pool."""
    start: int
    """Position, in the sequence that wrote it, of the block's first token."""
    length: int
    """Tokens stored; 0 in a free block."""


class BlockPool:
    """Refcounts and records of a group's blocks, and its free blocks.

    Records exist only for blocks that were ever used, so a large pool costs nothing to build. The
    planner reads ``infos`` and ``refcounts``, by block index; only this class changes refcounts.
    """

    def __init__(
        self,
        *,
        layer: int,
        first_id: int,
        size: int,
        block_size: int,
        frees_out_of_window: bool = False,
    ) -> None:
        """Make a pool of ``size`` blocks, whose first, ``first_id``, is the scratch block.

        With ``frees_out_of_window``, the scratch block replaces blocks that left a window in lists.
        """
        self.layer = layer
        self.frees_out_of_window = frees_out_of_window
        self.first_id = first_id
        self.size = size
        self.block_size = block_size
        self.infos = [KVBlockInfo(layer, SCRATCH, 0, 0)]
        self.refcounts = [0]
        self._freed_indices: list[int] = []
        self.num_free = size - 1

    def require_free_blocks(self, needed: int) -> None:
        """Raise unless ``needed`` blocks are free."""
        if needed > self.num_free:
            raise OutOfBlocks(needed=needed, free=self.num_free, owner=f"layer {self.layer}")

    def allocate(self, *, start: int, length: int) -> KVBlockInfo:
        """Allocate the block freed last, or one never used, with refcount 1; return its record."""
        if self._freed_indices:
            info = self.infos[self._freed_indices.pop()]
            info.start = start
            info.length = length
        else:
            self.require_free_blocks(1)
            info = KVBlockInfo(self.layer, len(self.infos), start, length)
            self.infos.append(info)
            self.refcounts.append(0)
        self.refcounts[info.block_index] = 1
        self.num_free -= 1
        return info

    def decref(self, index: int) -> None:
        """Decrement the refcount of a held block, freeing it at 0."""
        self.refcounts[index] -= 1
        if not self.refcounts[index]:
            info = self.infos[index]
            info.start = info.length = 0
            self._freed_indices.append(index)
            self.num_free += 1

    def incref(self, index: int) -> None:
        self.refcounts[index] += 1

    def mirror_block(self, block_id: int, start: int, length: int) -> None:
        """Record a block that another cache allocated, with refcount 1."""
        index = self.index_of(block_id)
        while len(self.infos) <= index:
            self.infos.append(KVBlockInfo(self.layer, len(self.infos), 0, 0))
            self.refcounts.append(0)
        self.infos[index] = KVBlockInfo(self.layer, index, start, length)
        self.refcounts[index] = 1

    def index_of(self, block_id: int) -> int:
        """Return the index of a block of this pool; raise for the scratch block and all others."""
        index = block_id - self.first_id
        if not 0 <= index < self.size:
            raise BadBlock(
                f"block {block_id} does not belong to layer {self.layer}, whose blocks are "
                f"{self.first_id + 1} to {self.first_id + self.size - 1}"
            )
        if index == SCRATCH:
            raise BadBlock(f"block {block_id} is layer {self.layer}'s scratch block")
        return index

    def refcount(self, block_id: int) -> int:
        index = self.index_of(block_id)
        return self.refcounts[index] if index < len(self.refcounts) else 0

    def held_block_info(self, block_id: int) -> KVBlockInfo:
        """Return the record of a block; raise if it is free."""
        if not self.refcount(block_id):
            raise BadBlock(f"block {block_id} of layer {self.layer} is free: no sequence holds it")
        return self.infos[block_id - self.first_id]

    def info(self, block_id: int) -> KVBlockInfo:
        """Return the record of a block, held or free."""
        index = self.index_of(block_id)
        if index < len(self.infos):
            return self.infos[index]
        return KVBlockInfo(self.layer, index, 0, 0)

    def check_decref(self, block_ids: Iterable[int]) -> None:
        """Raise unless every block's refcount is at least its number of occurrences."""
        for block_id, times in Counter(block_ids).items():
            count = self.refcount(block_id)
            if times > count:
                raise BadRefcount(
                    f"block {block_id} of layer {self.layer} is held {count} times and would be "
                    f"freed {times} times"
                )


def count_out_of_window(block_ids: Sequence[int]) -> int:
    """Count the leading blocks of a list that left the window and are ``SCRATCH`` now."""
    return next(
        (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), len(block_ids)
    )
