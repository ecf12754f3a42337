"""Cached sequence: its tokens and the blocks of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.manager import KVBlockManager


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Sequence that a model continues."""

    block_lists: list[list[int]]
    """Block list of each group of layers."""
    token_ids: list[int] = field(default_factory=list)
    num_stored: int = 0
    """Tokens, from the first, whose keys and values are in the cache."""
    token_capacity: int = 0
    """Tokens that fit into the blocks that it may write to."""

    def free_all_blocks(self, kv: KVBlockManager) -> None:
        """Free all blocks and keep the token ids, so that they can be stored again."""
        for group, block_ids in zip(kv.groups, self.block_lists, strict=True):
            kv.free_blocks(group.layers[0], block_ids)
        self.block_lists = [[] for _ in self.block_lists]
        self.num_stored = self.token_capacity = 0

    def truncate(self, kv: KVBlockManager, most: int) -> None:
        """Keep at most ``most`` stored tokens, and no capacity for more."""
        self.num_stored = min(self.num_stored, most)
        kv.truncate_groups([self.block_lists], [self.num_stored])
        self.token_capacity = min(self.token_capacity, self.num_stored)

    def roll_back(self, kv: KVBlockManager, most: int) -> None:
        """Keep at most ``most`` stored tokens, and the capacity of the last block.

        The sequence must be allowed to write to that block.
        """
        self.truncate(kv, most)
        self.token_capacity = len(self.block_lists[0]) * kv.block_size


def reserve(kv: KVBlockManager, sequences: Sequence[CachedSequence], counts: Sequence[int]) -> None:
    """Allocate room for ``counts[i]`` more tokens of ``sessions[i]``, in all groups of layers."""
    for at, group in enumerate(kv.groups):
        kv.reserve(group.layers[0], [sequence.block_lists[at] for sequence in sequences], counts)
    for sequence in sequences:
        sequence.token_capacity = len(sequence.block_lists[0]) * kv.block_size
