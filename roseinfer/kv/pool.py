"""The blocks of one group of layers: how many hold each, how full it is, and which are free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import BadBlock, BadRefcount, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRATCH = 0
"""Index of the block that no sequence ever owns; padding is written there."""


@dataclass(slots=True)
class KVBlockInfo:
    """The record of one block, which is changed in place for as long as the pool lives."""

    layer: int
    """First layer of the group the block belongs to; 0 where groups share a pool."""
    block_index: int
    """Index within the group's pool."""
    start: int
    """Position, in the sequence that wrote it, of the block's first token."""
    length: int
    """Tokens stored; 0 in a free block."""


class BlockPool:
    """Reference counts and records of a group's blocks, and the free ones.

    Records exist only for blocks that were ever used, so a large pool costs nothing to build. The
    planner reads ``infos`` and ``refcounts``, by block index; only this class changes who owns
    what.
    """

    def __init__(
        self, *, layer: int, first_id: int, size: int, block_size: int, gives_back: bool = False
    ) -> None:
        """With ``gives_back``, the scratch block stands in lists for what left a window."""
        self.layer = layer
        self.gives_back = gives_back
        self.first_id = first_id
        self.size = size
        self.block_size = block_size
        self.infos = [KVBlockInfo(layer, SCRATCH, 0, 0)]
        self.refcounts = [0]
        self._recycled: list[int] = []
        self.num_free = size - 1

    def require(self, needed: int) -> None:
        """Raise unless ``needed`` blocks can be taken."""
        if needed > self.num_free:
            raise OutOfBlocks(needed=needed, free=self.num_free, where=f"layer {self.layer}")

    def take(self, *, start: int, length: int) -> KVBlockInfo:
        """Give a block to its first holder: the one freed last, or one never used."""
        if self._recycled:
            info = self.infos[self._recycled.pop()]
            info.start = start
            info.length = length
        else:
            self.require(1)
            info = KVBlockInfo(self.layer, len(self.infos), start, length)
            self.infos.append(info)
            self.refcounts.append(0)
        self.refcounts[info.block_index] = 1
        self.num_free -= 1
        return info

    def drop(self, index: int) -> None:
        """Take one reference off a held block; the last one frees it."""
        self.refcounts[index] -= 1
        if not self.refcounts[index]:
            info = self.infos[index]
            info.start = info.length = 0
            self._recycled.append(index)
            self.num_free += 1

    def share(self, index: int) -> None:
        self.refcounts[index] += 1

    def adopt(self, block_id: int, start: int, length: int) -> None:
        """Record a block that was given out elsewhere, as held by one."""
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

    def held(self, block_id: int) -> KVBlockInfo:
        """Return the record of a block; raise if it is free."""
        if not self.refcount(block_id):
            raise BadBlock(f"block {block_id} of layer {self.layer} is free: nobody holds it")
        return self.infos[block_id - self.first_id]

    def info(self, block_id: int) -> KVBlockInfo:
        """Return the record of a block, held or free."""
        index = self.index_of(block_id)
        if index < len(self.infos):
            return self.infos[index]
        return KVBlockInfo(self.layer, index, 0, 0)

    def check_release(self, block_ids: Iterable[int]) -> None:
        """Raise unless every id is held at least as often as it occurs."""
        for block_id, times in Counter(block_ids).items():
            count = self.refcount(block_id)
            if times > count:
                raise BadRefcount(
                    f"block {block_id} of layer {self.layer} is held {count} times and would be "
                    f"freed {times} times"
                )
