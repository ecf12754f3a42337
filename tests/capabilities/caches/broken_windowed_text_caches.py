"""Windowed caches with prefix reuse that have one bug each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.windowed_text_cache import KeepingPool, WindowedTextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.capabilities.caches.window_cache import Group
    from tests.capabilities.caches.windowed_text_cache import Key


class BeginsATokenTooLate(WindowedTextCache):
    """Leaves out the block with the first live token of a found prefix."""

    def first_needed(self, group: Group, found: int) -> int:
        return super().first_needed(group, found + 1)


class LooksIntoOneGroup(WindowedTextCache):
    """Finds a text where only the last group has it."""

    def lookup_groups(self) -> list[tuple[int, Group]]:
        return super().lookup_groups()[-1:]


class OneKeyForAllGroups(WindowedTextCache):
    """Finds the block of a text in another group than stored it."""

    def blocks_of(self, at: int, token_ids: Sequence[int]) -> list[int | None]:
        groups = [at, *range(len(self.groups))]
        every = zip(
            *(
                super(OneKeyForAllGroups, self).blocks_of(group_index, token_ids)
                for group_index in groups
            ),
            strict=True,
        )
        return [next((block for block in same if block is not None), None) for same in every]


class FindsTakenBlocks(WindowedTextCache):
    """Finds a block by its old tokens after another group took it."""

    class Pool(KeepingPool):
        def take(self) -> int:
            keys, blocks = dict(self.key_of), dict(self.block_of)
            block = super().take()
            if block in keys:
                self.block_of = blocks
            return block

        def register(self, key: Key, block: int) -> None:
            self.block_of[key] = block
            self.key_of[block] = key

    def new_pool(self) -> KeepingPool:
        return self.Pool(list(range(self.spec.num_blocks)))


class FreesByThePromptLength(WindowedTextCache):
    """Frees blocks of a found prefix by the window of the whole prompt."""

    def begin(self, seq: int, token_ids: Sequence[int]) -> None:
        self.prompt = len(self.row_tokens[0])
        super().begin(seq, token_ids)
        for group in self.groups:
            table = group.tables[seq]
            left = min(
                self.first_live(group.window, self.prompt) // self.spec.block_size, len(table)
            )
            self.give_back(group, table, left)


class HoldsBlocksOutOfWindow(WindowedTextCache):
    """Holds blocks of a text that are out of the window, and names them in no table."""

    def begin(self, seq: int, token_ids: Sequence[int]) -> None:
        super().begin(seq, token_ids)
        for at, group in enumerate(self.groups):
            for block in self.blocks_of(at, token_ids)[: self.first_needed(group, len(token_ids))]:
                if block is not None:
                    self.pool_of(group).hold(block)


class AdmitsWithoutCountingFoundBlocks(WindowedTextCache):
    """Admits a prompt by the blocks that are free before it takes the found ones."""

    def begin(self, seq: int, token_ids: Sequence[int]) -> None:
        free = len(self.groups[0].pool.unused)
        super().begin(seq, token_ids)
        new = -(-len(self.row_tokens[0]) // self.spec.block_size) * len(self.groups)
        if new > free:
            raise CacheFull


BROKEN = (
    BeginsATokenTooLate,
    LooksIntoOneGroup,
    OneKeyForAllGroups,
    FindsTakenBlocks,
    FreesByThePromptLength,
    HoldsBlocksOutOfWindow,
    AdmitsWithoutCountingFoundBlocks,
)
