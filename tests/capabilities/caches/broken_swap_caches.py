"""Caches with broken preemption or swapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.capabilities.caches.swap_cache import (
    EagerSwapCache,
    SharesABlock,
    SwapCache,
    SwapTextCache,
    Transfer,
    UnsharedSwapCache,
)

if TYPE_CHECKING:
    import torch


class ReusesBlocksBeforeTheCopy(SwapCache):
    """S7: frees the blocks while they are copied out."""

    def swap_out(self, seq: int) -> object:
        leaving = super().swap_out(seq)
        self.drop(self.tables[seq])
        return leaving

    def give_back(self, leaving: Transfer) -> None:
        del self.tables[leaving.seq], self.lengths[leaving.seq]


class LetsForksWriteBeforeTheCopy(SwapCache):
    """S7: makes forks the only holders of shared blocks while a sequence is copied out."""

    def swap_out(self, seq: int) -> object:
        self.shared = [block for block in self.tables[seq] if self.holders[block] > 1]
        self.drop(self.shared)
        return super().swap_out(seq)

    def give_back(self, leaving: Transfer) -> None:
        self.holders.update(self.shared)
        super().give_back(leaving)


class CopiesFreedBlocks(EagerSwapCache):
    """S7: copies out after the blocks were freed, and possibly reused."""

    def swap_out(self, seq: int) -> object:
        leaving = SwapCache.swap_out(self, seq)
        self.give_back(self.transfers[seq])
        return leaving

    def finish_swap_out(self, leaving: Any) -> None:
        self.copy_out(leaving)


class BringsBackInAnotherOrder(SwapCache):
    """S8: restores the right blocks in the wrong order."""

    def copy_in(self, coming: Transfer) -> None:
        coming.space.sort()
        super().copy_in(coming)


class BringsBackToTheOldBlocks(SwapCache):
    """S8: restores to the blocks that the sequence had before."""

    def swap_in(self, seq: int) -> object:
        old = self.transfers[seq].blocks
        coming = super().swap_in(seq)
        self.transfers[seq].blocks = old
        return coming


class BringsBackOneLayer(SwapCache):
    """S8: restores the first layer only."""

    def copy_in(self, coming: Transfer) -> None:
        self.keys[0, coming.blocks] = self.space_keys[0, coming.space]
        self.values[0, coming.blocks] = self.space_values[0, coming.space]


class BringsBackFullBlocks(SwapCache):
    """S8: restores full blocks only."""

    def copy_in(self, coming: Transfer) -> None:
        full = coming.length // self.spec.block_size
        super().copy_in(
            Transfer(coming.seq, coming.length, coming.blocks[:full], coming.space[:full])
        )


class ReadsBeforeSwapIn(SwapCache):
    """S8: lets a sequence be read as soon as it has blocks."""

    def swap_in(self, seq: int) -> object:
        coming = super().swap_in(seq)
        self.lengths[seq] = self.transfers[seq].length
        return coming


class FindsTextsBeforeSwapIn(SwapTextCache):
    """S8: lets lookups find the text of a sequence that is still being swapped in."""

    def swap_in(self, seq: int) -> object:
        coming = super().swap_in(seq)
        self.register_all(seq, self.swapped_out[seq][0])
        return coming


class SharesBlocksByOldContents(SwapTextCache):
    """S8: assumes that blocks it does not restore still hold their old tokens."""

    def finish_swap_out(self, leaving: Any) -> None:
        self.old_table = self.tables[leaving]
        super().finish_swap_out(leaving)

    def finish_swap_in(self, coming: Any) -> None:
        seq, found = coming
        super().finish_swap_in((seq, max(found, min(1, len(self.tables[seq])))))


class LooksAtTheLastBlock(UnsharedSwapCache):
    """S9: swaps a sequence out unless its last block is shared, and so frees others' blocks."""

    def swap_out(self, seq: int) -> object:
        if self.holders[self.tables[seq][-1]] > 1:
            raise SharesABlock(f"sequence {seq}")
        return SwapCache.swap_out(self, seq)


class TakesSpaceBeforeItRefuses(UnsharedSwapCache):
    """S9: takes swap space for a sequence before it refuses to swap it out."""

    def swap_out(self, seq: int) -> object:
        try:
            return super().swap_out(seq)
        except SharesABlock:
            del self.space[-len(self.tables[seq]) :]
            raise


class FreesUnderOthers(SwapCache):
    """Frees the blocks, whoever else holds them."""

    def give_back(self, leaving: Transfer) -> None:
        for block in self.tables.pop(leaving.seq):
            if self.holders[block]:
                self.holders[block] = 0
                self.unused.append(block)
        del self.lengths[leaving.seq]


class KeepsSharedBlocks(SwapCache):
    """Frees its own blocks, and stays a holder of shared ones."""

    def give_back(self, leaving: Transfer) -> None:
        self.drop(block for block in self.tables.pop(leaving.seq) if self.holders[block] == 1)
        del self.lengths[leaving.seq]


class GivesBackTwice(SwapCache):
    """Drops two references to each shared block."""

    def give_back(self, leaving: Transfer) -> None:
        self.drop(block for block in leaving.blocks if self.holders[block] > 1)
        super().give_back(leaving)


class LeaksSwapSpaceOnFree(SwapCache):
    """S9: leaks the swap space of a sequence that is freed while swapped out."""

    def free(self, seq: int) -> None:
        space = list(self.space)
        super().free(seq)
        self.space = space


class LeaksSwapSpaceOnCancelledSwapOut(SwapCache):
    """S9: leaks the swap space of a sequence that is freed during its swap out."""

    def free(self, seq: int) -> None:
        leaving = seq in self.transfers and seq in self.lengths
        space = list(self.space)
        super().free(seq)
        if leaving:
            self.space = space


class LeaksBlocksOnCancelledSwapIn(SwapCache):
    """S9: leaks the blocks of a sequence that is freed during its swap in."""

    def free(self, seq: int) -> None:
        if seq in self.transfers and seq not in self.lengths:
            self.tables.pop(seq, None)
        super().free(seq)


class LeaksSwapSpaceOnSwapIn(SwapCache):
    """Leaks the swap space of a sequence that was swapped in."""

    def finish_swap_in(self, coming: Any) -> None:
        space = list(self.space)
        super().finish_swap_in(coming)
        self.space = space


class TakesBlocksBeforeItRefuses(SwapCache):
    """Takes the free blocks before it refuses a sequence that does not fit."""

    def take_for(self, tokens: int) -> list[int]:
        return [self.take() for _ in range(-(-tokens // self.spec.block_size))]


class KeepsTheOldLength(SwapCache):
    """23: keeps the length of a preempted sequence, and resumes it after its old tokens."""

    def preempt(self, seq: int) -> None:
        self.drop(self.tables.pop(seq))


class KeepsTheBlocks(SwapCache):
    """Holds the blocks of a preempted sequence until it is resumed."""

    def preempt(self, seq: int) -> None:
        del self.lengths[seq]

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.drop(self.tables.pop(seq))
        super().resume(seq, key, value)


class ForgetsForks(SwapCache):
    """Frees the blocks that a preempted sequence shares with its forks."""

    def preempt(self, seq: int) -> None:
        for block in self.tables[seq]:
            self.holders[block] = 1
        super().preempt(seq)


BROKEN = (
    ReusesBlocksBeforeTheCopy,
    LetsForksWriteBeforeTheCopy,
    CopiesFreedBlocks,
    BringsBackInAnotherOrder,
    BringsBackToTheOldBlocks,
    BringsBackOneLayer,
    BringsBackFullBlocks,
    ReadsBeforeSwapIn,
    FindsTextsBeforeSwapIn,
    SharesBlocksByOldContents,
    LooksAtTheLastBlock,
    TakesSpaceBeforeItRefuses,
    FreesUnderOthers,
    KeepsSharedBlocks,
    GivesBackTwice,
    LeaksSwapSpaceOnFree,
    LeaksSwapSpaceOnCancelledSwapOut,
    LeaksBlocksOnCancelledSwapIn,
    LeaksSwapSpaceOnSwapIn,
    TakesBlocksBeforeItRefuses,
    KeepsTheOldLength,
    KeepsTheBlocks,
    ForgetsForks,
)
