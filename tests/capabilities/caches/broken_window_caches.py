"""Windowed caches with one bug each, based on `WindowCache` or a variant of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull

from .window_cache import (
    CopyingCache,
    EagerSharedCache,
    FixedWindowCache,
    Group,
    LazyCache,
    SharedPoolCache,
    TryingCache,
    WindowCache,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer import CacheSpec

    from .window_cache import Slots


class FreesATokenEarly(WindowCache):
    """S13, too early: frees a block while its last token may be attended to."""

    def live_of(self, group: Group, length: int) -> int:
        return super().live_of(group, length + 1)


class FreesATokenLate(WindowCache):
    """S13, too late: counts W tokens before the next one, not W - 1."""

    def live_of(self, group: Group, length: int) -> int:
        return super().live_of(group, max(0, length - 1))


class RoundsItsWindowDown(FixedWindowCache):
    """S13, too early: keeps four of the five tokens of its window, a block of the model."""

    def live_of(self, group: Group, length: int) -> int:
        return self.first_live(group.window and group.window - 1, length)


class FreesByTheNextWriteOnly(WindowCache):
    """S13, too late: declares "at once", and frees on the next write to the sequence."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        for seq in seqs:
            super().slide(seq)
        return super().reserve(seqs, counts)

    def slide(self, seq: int) -> None:
        """Do nothing after a write."""


class FreesOneBlockAtATime(LazyCache):
    """S13, too late: frees only the latest of several blocks out of the window."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        latest = table[max(0, left - 1) : left]
        group.pool.drop(latest)
        table[max(0, left - 1) : left] = [None] * len(latest)


class FreesEachBlockButTheFirst(SharedPoolCache):
    """S13, never: stops one block before the first, as if that were None already."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        group.pool.drop(table[1:left])
        table[1:left] = [None] * len(table[1:left])


class FreesAgainAtTheEnd(WindowCache):
    """S13, twice: frees a block out of the window again when the sequence is freed."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.freed: dict[tuple[int, int], set[int]] = {}

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        (seq,) = (name for name, own in group.tables.items() if own is table)
        freed_blocks = [block for block in table[:left] if block is not None]
        self.freed.setdefault((self.groups.index(group), seq), set()).update(freed_blocks)
        super().give_back(group, table, left)

    def free(self, seq: int) -> None:
        for at, group in enumerate(self.groups):
            group.pool.unused += self.freed.pop((at, seq), set())
        super().free(seq)


class FreesTwiceAcrossGroups(SharedPoolCache):
    """S13, twice across groups: frees a window's block once for every group of the pool."""

    def give_back(
        self,
        group: Group,  # noqa: ARG002
        table: list[int | None],
        left: int,
    ) -> None:
        for each in self.groups:
            if each.window is not None:
                each.pool.drop(table[:left])
        table[:left] = [None] * len(table[:left])


class GivesOneBlockToTwoGroups(EagerSharedCache):
    """Gives the second group the first group's block, as if it had a pool of its own."""

    def slot(
        self, group: Group, seq: int, more: int, copied: list[tuple[int, int]]
    ) -> tuple[int, int]:
        slot = super().slot(group, seq, more, copied)
        first = self.groups[0].tables[seq]
        table = group.tables[seq]
        if group is not self.groups[0] and slot[1] == 0 and first[-1] is not None:
            group.pool.drop(table[-1:])
            table[-1] = first[-1]
            group.pool.holders[first[-1]] += 1
            return first[-1], 0
        return slot


class UsesTheFirstGroupsWindow(WindowCache):
    """Applies the window of the first group to every group."""

    def live_of(self, group: Group, length: int) -> int:  # noqa: ARG002
        return super().live_of(self.groups[0], length)


class SlidesTheFirstGroupOnly(EagerSharedCache):
    """Keeps blocks out of the window in all groups but the first."""

    def slide(self, seq: int) -> None:
        self.slide_in(self.groups[0], seq)


class ReturnsATokenTooMany(LazyCache):
    """21: returns W tokens, and so the one before the window."""

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first_live(self.spec.windows[layer], max(0, self.lengths[seq] - 1))
        return self.tokens_from(start, seq, layer)


class AttendsToATokenTooMany(LazyCache):
    """21: attends to the token before the window, if it is still stored."""

    def attended_tokens(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first_live(self.spec.windows[layer], self.lengths[seq])
        held = start and self.table(seq, layer)[(start - 1) // self.spec.block_size] is not None
        return self.tokens_from(start - bool(held), seq, layer)


class AttendsToAll(SharedPoolCache):
    """Attends to all tokens that are still stored."""

    def attended_tokens(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens_from(
            self.table(seq, layer).count(None) * self.spec.block_size, seq, layer
        )


class AttendsByAnotherLayersWindow(WindowCache):
    """Attends in every layer by the smallest window of all."""

    def attended_tokens(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.lengths[seq]
        return self.tokens_from(
            max(self.first_live(window, length) for window in self.windows_of_groups), seq, layer
        )


class OmitsNones(WindowCache):
    """Leaves the Nones of freed blocks out of its table."""

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return [block for block in super().table(seq, layer) if block is not None]


class NamesFreedBlocks(WindowCache):
    """Names freed blocks in its table."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.named_blocks: dict[tuple[int, int], dict[int, int]] = {}

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        table = super().table(seq, layer)
        named_blocks = self.named_blocks.setdefault((seq, layer), {})
        named_blocks.update({at: block for at, block in enumerate(table) if block is not None})
        return [named_blocks.get(at) for at in range(len(table))]


class FreesUnderAFork(LazyCache):
    """Frees blocks out of the window of one sequence, whoever else holds them."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        for block in table[:left]:
            if block is not None:
                group.pool.holders[block] = 1
        super().give_back(group, table, left)


class ForksWithoutTheHoles(SharedPoolCache):
    """Begins a fork's table with the blocks that are left, without the Nones before them."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        for group in self.groups:
            group.tables[child] = [block for block in group.tables[child] if block is not None]


class SlidesBeforeItIsWritten(WindowCache):
    """Frees reserved blocks before their tokens are written."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        reservation = super().reserve(seqs, counts)
        for seq in seqs:
            self.slide(seq)
        return reservation


class TruncatesIntoFreedBlocks(WindowCache):
    """Accepts truncations into freed blocks."""

    def truncate(self, seq: int, length: int) -> None:
        can_truncate, self.can_truncate = self.can_truncate, lambda *_: True  # type: ignore[method-assign]
        try:
            super().truncate(seq, length)
        finally:
            self.can_truncate = can_truncate  # type: ignore[method-assign]


class FreesOnRefusedWrites(LazyCache):
    """Frees blocks out of the window before it refuses a write."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        for seq in seqs:
            self.slide(seq)
        return super().reserve(seqs, counts)


class ChecksGroupByGroup(CopyingCache):
    """Cuts a sequence if the pool has room for the copy of each group alone, but not of all."""

    def own_last_blocks(self, seq: int) -> list[tuple[Group, int, int]]:
        free = len(self.groups[0].pool.unused)
        copies = []
        for group in self.groups:
            last = group.tables[seq][-1]
            if last is not None and group.pool.holders[last] > 1:
                if not free:
                    raise CacheFull
                if group.pool.unused:
                    group.tables[seq][-1] = own = group.pool.take()
                    group.pool.drop([last])
                    copies.append((group, last, own))
        return copies


class FreesForAdmittedRowsOnly(TryingCache):
    """Frees blocks for admitted rows only."""

    def give_back_for(self, seq: int) -> None:
        pass


BROKEN = (
    FreesATokenEarly,
    FreesATokenLate,
    RoundsItsWindowDown,
    FreesByTheNextWriteOnly,
    FreesOneBlockAtATime,
    FreesEachBlockButTheFirst,
    FreesAgainAtTheEnd,
    FreesTwiceAcrossGroups,
    GivesOneBlockToTwoGroups,
    UsesTheFirstGroupsWindow,
    SlidesTheFirstGroupOnly,
    ReturnsATokenTooMany,
    AttendsToATokenTooMany,
    AttendsToAll,
    AttendsByAnotherLayersWindow,
    OmitsNones,
    NamesFreedBlocks,
    FreesUnderAFork,
    ForksWithoutTheHoles,
    SlidesBeforeItIsWritten,
    TruncatesIntoFreedBlocks,
    FreesOnRefusedWrites,
    ChecksGroupByGroup,
    FreesForAdmittedRowsOnly,
)
