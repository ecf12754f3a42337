"""Caches that preempt or swap wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.swap_cache import EagerSwapCache, SwapCache, SwapTextCache, Transfer

if TYPE_CHECKING:
    import torch


class ReusesBlocksBeforeTheCopy(SwapCache):
    """S7: the blocks are free for others while they are copied out."""

    def swap_out(self, seq: int) -> object:
        leaving = super().swap_out(seq)
        self.drop(self.tables[seq])
        return leaving

    def give_back(self, leaving: Transfer) -> None:
        del self.tables[leaving.seq], self.lengths[leaving.seq]


class LetsForksWriteBeforeTheCopy(SwapCache):
    """S7: while a sequence is copied out, its forks are alone on the blocks they share with it."""

    def swap_out(self, seq: int) -> object:
        self.shared = [block for block in self.tables[seq] if self.holders[block] > 1]
        self.drop(self.shared)
        return super().swap_out(seq)

    def give_back(self, leaving: Transfer) -> None:
        self.holders.update(self.shared)
        super().give_back(leaving)


class CopiesWhatIsFree(EagerSwapCache):
    """S7: the copy is made when the blocks may be another's."""

    def swap_out(self, seq: int) -> object:
        leaving = SwapCache.swap_out(self, seq)
        self.give_back(self.away[seq])
        return leaving

    def finish_swap_out(self, leaving: Any) -> None:
        self.copy_out(leaving)


class BringsBackInAnotherOrder(SwapCache):
    """S8: the blocks are those of the sequence, and not in its order."""

    def copy_in(self, coming: Transfer) -> None:
        coming.space.sort()
        super().copy_in(coming)


class BringsBackToTheOldBlocks(SwapCache):
    """S8: it writes to the blocks that the sequence had."""

    def swap_in(self, seq: int) -> object:
        old = self.away[seq].blocks
        coming = super().swap_in(seq)
        self.away[seq].blocks = old
        return coming


class BringsBackOneLayer(SwapCache):
    """S8: what the other layers hold is left behind."""

    def copy_in(self, coming: Transfer) -> None:
        self.keys[0, coming.blocks] = self.space_keys[0, coming.space]
        self.values[0, coming.blocks] = self.space_values[0, coming.space]


class BringsBackFullBlocks(SwapCache):
    """S8: a partial block is left behind."""

    def copy_in(self, coming: Transfer) -> None:
        full = coming.length // self.spec.block_size
        super().copy_in(
            Transfer(coming.seq, coming.length, coming.blocks[:full], coming.space[:full])
        )


class ReadsWhatIsNotBack(SwapCache):
    """S8: a sequence can be read from the moment it has blocks."""

    def swap_in(self, seq: int) -> object:
        coming = super().swap_in(seq)
        self.lengths[seq] = self.away[seq].length
        return coming


class FindsWhatIsNotBack(SwapTextCache):
    """S8: others find the text of a sequence that is on its way back."""

    def swap_in(self, seq: int) -> object:
        coming = super().swap_in(seq)
        self.register_all(seq, self.out[seq][0])
        return coming


class SharesWhatWasThere(SwapTextCache):
    """S8: it takes for granted that the cache still holds what is not written there again."""

    def finish_swap_out(self, leaving: Any) -> None:
        self.was = self.tables[leaving]
        super().finish_swap_out(leaving)

    def finish_swap_in(self, coming: Any) -> None:
        seq, found = coming
        super().finish_swap_in((seq, max(found, min(1, len(self.tables[seq])))))


class FreesUnderOthers(SwapCache):
    """The blocks are free, whoever else holds them."""

    def give_back(self, leaving: Transfer) -> None:
        for block in self.tables.pop(leaving.seq):
            if self.holders[block]:
                self.holders[block] = 0
                self.unused.append(block)
        del self.lengths[leaving.seq]


class HoldsWhatIsShared(SwapCache):
    """It gives back the blocks that nobody else holds, and stays a holder of the others."""

    def give_back(self, leaving: Transfer) -> None:
        self.drop(block for block in self.tables.pop(leaving.seq) if self.holders[block] == 1)
        del self.lengths[leaving.seq]


class GivesBackTwice(SwapCache):
    """It takes two holders off blocks that others hold."""

    def give_back(self, leaving: Transfer) -> None:
        self.drop(block for block in leaving.blocks if self.holders[block] > 1)
        super().give_back(leaving)


class LeaksSpaceOfTheFreed(SwapCache):
    """S9: what is away when it is freed keeps its swap space."""

    def free(self, seq: int) -> None:
        space = list(self.space)
        super().free(seq)
        self.space = space


class LeaksSpaceOfTheCancelled(SwapCache):
    """S9: a sequence that is freed on its way out keeps its swap space."""

    def free(self, seq: int) -> None:
        leaving = seq in self.away and seq in self.lengths
        space = list(self.space)
        super().free(seq)
        if leaving:
            self.space = space


class KeepsTheBlocksOfTheCancelled(SwapCache):
    """S9: a sequence that is freed on its way back keeps the blocks it was to have."""

    def free(self, seq: int) -> None:
        if seq in self.away and seq not in self.lengths:
            self.tables.pop(seq, None)
        super().free(seq)


class GivesNoSpaceBack(SwapCache):
    """What is back keeps its swap space."""

    def finish_swap_in(self, coming: Any) -> None:
        space = list(self.space)
        super().finish_swap_in(coming)
        self.space = space


class TakesBlocksBeforeItRefuses(SwapCache):
    """A sequence for which there is no room has what room there was."""

    def take_for(self, tokens: int) -> list[int]:
        return [self.take() for _ in range(-(-tokens // self.spec.block_size))]


class KeepsTheOldLength(SwapCache):
    """23: what is resumed comes behind what was there."""

    def preempt(self, seq: int) -> None:
        self.drop(self.tables.pop(seq))


class KeepsTheBlocks(SwapCache):
    """What is preempted holds its blocks until it is resumed."""

    def preempt(self, seq: int) -> None:
        del self.lengths[seq]

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.drop(self.tables.pop(seq))
        super().resume(seq, key, value)


class ForgetsForks(SwapCache):
    """A preempted sequence frees its blocks under its forks."""

    def preempt(self, seq: int) -> None:
        for block in self.tables[seq]:
            self.holders[block] = 1
        super().preempt(seq)


BROKEN = (
    ReusesBlocksBeforeTheCopy,
    LetsForksWriteBeforeTheCopy,
    CopiesWhatIsFree,
    BringsBackInAnotherOrder,
    BringsBackToTheOldBlocks,
    BringsBackOneLayer,
    BringsBackFullBlocks,
    ReadsWhatIsNotBack,
    FindsWhatIsNotBack,
    SharesWhatWasThere,
    FreesUnderOthers,
    HoldsWhatIsShared,
    GivesBackTwice,
    LeaksSpaceOfTheFreed,
    LeaksSpaceOfTheCancelled,
    KeepsTheBlocksOfTheCancelled,
    GivesNoSpaceBack,
    TakesBlocksBeforeItRefuses,
    KeepsTheOldLength,
    KeepsTheBlocks,
    ForgetsForks,
)
