"""Caches that keep the blocks of preempted sequences while no other one needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer import CacheFull
from tests.capabilities.caches.swap_cache import SwapCache

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer import CacheSpec, Ledger


class KeepsUntilNeeded(SwapCache):
    """Gives a preempted sequence its own blocks back, unless they were taken. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.kept: dict[int, list[int]] = {}
        """Blocks of preempted sequences, which are free and still hold their tokens."""

    def preempt(self, seq: int) -> None:
        blocks = self.tables[seq]
        super().preempt(seq)
        if not any(self.holders[block] for block in blocks):
            self.kept[seq] = blocks

    def take(self) -> int:
        block = super().take()
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Forget the preempted sequence that had a block."""
        self.kept = {seq: blocks for seq, blocks in self.kept.items() if block not in blocks}

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if blocks := self.kept.pop(seq, None):
            self.unused = [block for block in self.unused if block not in blocks]
            self.holders.update(blocks)
            self.tables[seq] = blocks
            self.lengths[seq] += key.shape[1]
        else:
            super().resume(seq, key, value)

    def free(self, seq: int) -> None:
        self.kept.pop(seq, None)
        super().free(seq)

    def ledger(self, layer: int) -> Ledger:
        kept = {block for blocks in self.kept.values() for block in blocks}
        return replace(super().ledger(layer), cached=kept)


class KeepsTakenBlocks(KeepsUntilNeeded):
    """23: gives a preempted sequence its blocks back, though another one has taken some."""

    def forget(self, block: int) -> None:
        """Do nothing."""


class HoldsKeptBlocks(KeepsUntilNeeded):
    """23: shows the blocks of preempted sequences as free, and has no room when all others end."""

    def take(self) -> int:
        kept = {block for blocks in self.kept.values() for block in blocks}
        if {*self.unused} <= kept:
            raise CacheFull("all free blocks are kept")
        return super().take()


BROKEN = (KeepsTakenBlocks, HoldsKeptBlocks)
