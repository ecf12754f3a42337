"""A sequence: its tokens, and where their keys and values are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.manager import KVBlockManager


@dataclass(slots=True, eq=False)
class InferenceSession:
    """A sequence that a model continues."""

    block_lists: list[list[int]]
    """A list of blocks for each group of layers."""
    token_ids: list[int] = field(default_factory=list)
    stored: int = 0
    """How many of the tokens have keys and values in the cache."""
    room: int = 0
    """How many tokens fit into the blocks that it may write to."""

    def rewind(self, kv: KVBlockManager) -> None:
        """Give back the blocks and keep the tokens, which can be stored again."""
        for group, block_ids in zip(kv.groups, self.block_lists, strict=True):
            kv.free_blocks(group.layers[0], block_ids)
        self.block_lists = [[] for _ in self.block_lists]
        self.stored = self.room = 0

    def cut(self, kv: KVBlockManager, most: int) -> None:
        """Keep what is stored of the first ``most`` tokens, without room for more."""
        self.stored = min(self.stored, most)
        kv.truncate_groups([self.block_lists], [self.stored])
        self.room = min(self.room, self.stored)

    def roll_back(self, kv: KVBlockManager, most: int) -> None:
        """Do the same to a sequence that may write to its last block, and leaves it that room."""
        self.cut(kv, most)
        self.room = len(self.block_lists[0]) * kv.block_size


def reserve(
    kv: KVBlockManager, sessions: Sequence[InferenceSession], counts: Sequence[int]
) -> None:
    """Give each of some sessions the room for so many more tokens, in all groups of layers."""
    for at, group in enumerate(kv.groups):
        kv.reserve(group.layers[0], [session.block_lists[at] for session in sessions], counts)
    for session in sessions:
        session.room = len(session.block_lists[0]) * kv.block_size
