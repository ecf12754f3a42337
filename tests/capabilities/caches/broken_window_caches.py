"""Ways to get windows wrong: each is `WindowCache`, or one of its kin, with one mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .window_cache import (
    EagerSharedCache,
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
    """S13, too early: a block is given back while its last token may be attended to."""

    def live_of(self, group: Group, length: int) -> int:
        return super().live_of(group, length + 1)


class FreesATokenLate(WindowCache):
    """S13, too late: it counts W tokens before the next one, not W - 1."""

    def live_of(self, group: Group, length: int) -> int:
        return super().live_of(group, max(0, length - 1))


class FreesByTheNextWriteOnly(WindowCache):
    """S13, too late: it says "at once" and gives back when the sequence is written to again."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        for seq in seqs:
            super().slide(seq)
        return super().reserve(seqs, counts)

    def slide(self, seq: int) -> None:
        """Do nothing after a write."""


class FreesOneBlockAtATime(LazyCache):
    """S13, too late: where several blocks left the window, only the latest is given back."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        latest = table[max(0, left - 1) : left]
        group.pool.drop(latest)
        table[max(0, left - 1) : left] = [None] * len(latest)


class FreesEachBlockButTheFirst(SharedPoolCache):
    """S13, never: it stops a block short of the first, as if that were None already."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        group.pool.drop(table[1:left])
        table[1:left] = [None] * len(table[1:left])


class FreesAgainAtTheEnd(WindowCache):
    """S13, twice: what was given back is given back again when the sequence is freed."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.ever: dict[tuple[int, int], set[int]] = {}

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        (seq,) = (name for name, own in group.tables.items() if own is table)
        gone = [block for block in table[:left] if block is not None]
        self.ever.setdefault((self.groups.index(group), seq), set()).update(gone)
        super().give_back(group, table, left)

    def free(self, seq: int) -> None:
        for at, group in enumerate(self.groups):
            group.pool.unused += self.ever.pop((at, seq), set())
        super().free(seq)


class FreesTwiceAcrossGroups(SharedPoolCache):
    """S13, twice across groups: a window's block is given back for every group of the pool."""

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
    """The second group gets the block that the first one got, as if its pool were its own."""

    def slot(
        self, group: Group, seq: int, more: int, copied: list[tuple[int, int]]
    ) -> tuple[int, int]:
        place = super().slot(group, seq, more, copied)
        first = self.groups[0].tables[seq]
        table = group.tables[seq]
        if group is not self.groups[0] and place[1] == 0 and first[-1] is not None:
            group.pool.drop(table[-1:])
            table[-1] = first[-1]
            group.pool.holders[first[-1]] += 1
            return first[-1], 0
        return place


class UsesTheFirstGroupsWindow(WindowCache):
    """Every group is slid by the window of the first one."""

    def live_of(self, group: Group, length: int) -> int:  # noqa: ARG002
        return super().live_of(self.groups[0], length)


class SlidesTheFirstGroupOnly(EagerSharedCache):
    """Other groups keep what left their windows."""

    def slide(self, seq: int) -> None:
        self.slide_in(self.groups[0], seq)


class ReturnsATokenTooMany(LazyCache):
    """21: it returns W tokens, the one before the window among them."""

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first_live(self.spec.windows[layer], max(0, self.lengths[seq] - 1))
        return self.tokens_from(start, seq, layer)


class AttendsToATokenTooMany(LazyCache):
    """21: it attends to the token before the window, if that is still there."""

    def attended(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first_live(self.spec.windows[layer], self.lengths[seq])
        held = start and self.table(seq, layer)[(start - 1) // self.spec.block_size] is not None
        return self.tokens_from(start - bool(held), seq, layer)


class AttendsToAll(SharedPoolCache):
    """It attends to all that is still there."""

    def attended(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens_from(
            self.table(seq, layer).count(None) * self.spec.block_size, seq, layer
        )


class AttendsByAnotherLayersWindow(WindowCache):
    """It attends in every layer by the smallest window of all."""

    def attended(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.lengths[seq]
        return self.tokens_from(
            max(self.first_live(window, length) for window in self.kinds), seq, layer
        )


class LeavesNoneOut(WindowCache):
    """Its table begins with the first block that is held."""

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return [block for block in super().table(seq, layer) if block is not None]


class NamesWhatItGaveBack(WindowCache):
    """Its table still names the blocks that it gave back."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.named: dict[tuple[int, int], dict[int, int]] = {}

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        table = super().table(seq, layer)
        named = self.named.setdefault((seq, layer), {})
        named.update({at: block for at, block in enumerate(table) if block is not None})
        return [named.get(at) for at in range(len(table))]


class FreesUnderAFork(LazyCache):
    """What leaves the window of one sequence is free, whoever else holds it."""

    def give_back(self, group: Group, table: list[int | None], left: int) -> None:
        for block in table[:left]:
            if block is not None:
                group.pool.holders[block] = 1
        super().give_back(group, table, left)


class ForksWithoutTheHoles(SharedPoolCache):
    """A fork of a sequence that gave blocks back begins with the blocks that it still has."""

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        for group in self.groups:
            group.tables[child] = [block for block in group.tables[child] if block is not None]


class SlidesBeforeItIsWritten(WindowCache):
    """Room that was reserved is given back before the tokens come that it was for."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        answer = super().reserve(seqs, counts)
        for seq in seqs:
            self.slide(seq)
        return answer


class CutsWhatItGaveBack(WindowCache):
    """It does not refuse to roll back to where blocks are missing."""

    def truncate(self, seq: int, length: int) -> None:
        can_truncate, self.can_truncate = self.can_truncate, lambda *_: True  # type: ignore[method-assign]
        try:
            super().truncate(seq, length)
        finally:
            self.can_truncate = can_truncate  # type: ignore[method-assign]


class SlidesThoughItRefuses(LazyCache):
    """A write that finds no room has given back what left the window before it."""

    def reserve(
        self, seqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[Sequence[int], list[Slots]]:
        for seq in seqs:
            self.slide(seq)
        return super().reserve(seqs, counts)


class SlidesOnlyWhatItAdmits(TryingCache):
    """A row that finds no room for want of what it would give back gives nothing back."""

    def give_back_for(self, seq: int) -> None:
        pass


BROKEN = (
    FreesATokenEarly,
    FreesATokenLate,
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
    LeavesNoneOut,
    NamesWhatItGaveBack,
    FreesUnderAFork,
    ForksWithoutTheHoles,
    SlidesBeforeItIsWritten,
    CutsWhatItGaveBack,
    SlidesThoughItRefuses,
    SlidesOnlyWhatItAdmits,
)
