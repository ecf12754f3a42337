"""Caches that mix up what each window's layers keep of texts, one in each way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.windowed_text_cache import KeepingPool, WindowedTextCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.capabilities.caches.window_cache import Group
    from tests.capabilities.caches.windowed_text_cache import Key


class BeginsATokenTooLate(WindowedTextCache):
    """The block that holds the first live token of what was found is left out."""

    def first_needed(self, group: Group, found: int) -> int:
        return super().first_needed(group, found + 1)


class LooksIntoOneGroup(WindowedTextCache):
    """What the last group has of a text counts as found, in whichever window."""

    def looked_into(self) -> list[tuple[int, Group]]:
        return super().looked_into()[-1:]


class OneKeyForAllGroups(WindowedTextCache):
    """A block is found for its text in whichever group it was stored."""

    def blocks_of(self, at: int, said: Sequence[int]) -> list[int | None]:
        groups = [at, *range(len(self.groups))]
        every = zip(
            *(super(OneKeyForAllGroups, self).blocks_of(of, said) for of in groups), strict=True
        )
        return [next((block for block in same if block is not None), None) for same in every]


class RemembersWhatWasTaken(WindowedTextCache):
    """A block that another group took is still found for what it held."""

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


class LeavesOutWhatThePromptLeaves(WindowedTextCache):
    """What is found is left out as if the whole prompt had been, and not only what was found."""

    def begin(self, seq: int, said: Sequence[int]) -> None:
        self.prompt = len(self.row_tokens[0])
        super().begin(seq, said)
        for group in self.groups:
            table = group.tables[seq]
            left = min(
                self.first_live(group.window, self.prompt) // self.spec.block_size, len(table)
            )
            self.give_back(group, table, left)


class HoldsWhatItLeavesOut(WindowedTextCache):
    """Blocks of a text that are behind its window are held, and named in no table."""

    def begin(self, seq: int, said: Sequence[int]) -> None:
        super().begin(seq, said)
        for at, group in enumerate(self.groups):
            for block in self.blocks_of(at, said)[: self.first_needed(group, len(said))]:
                if block is not None:
                    self.pool_of(group).hold(block)


class ForgetsThatFoundBlocksNeedRoom(WindowedTextCache):
    """A prompt is admitted by the blocks that are free before it takes those that it found."""

    def begin(self, seq: int, said: Sequence[int]) -> None:
        free = len(self.groups[0].pool.unused)
        super().begin(seq, said)
        new = -(-len(self.row_tokens[0]) // self.spec.block_size) * len(self.groups)
        if new > free:
            raise CacheFull


BROKEN = (
    BeginsATokenTooLate,
    LooksIntoOneGroup,
    OneKeyForAllGroups,
    RemembersWhatWasTaken,
    LeavesOutWhatThePromptLeaves,
    HoldsWhatItLeavesOut,
    ForgetsThatFoundBlocksNeedRoom,
)
