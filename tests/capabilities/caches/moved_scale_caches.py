"""Quantised caches that move blocks with their scales, and ones that leave the scales behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.capabilities.caches.moving_cache import CompactingCache, ForkingCache
from tests.capabilities.caches.quantised_caches import Int8Texts, Int8Tokens
from tests.capabilities.caches.swap_cache import SwapCache, Transfer
from tests.capabilities.caches.tier_cache import SlotCopy, WriteThroughCache

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


class Int8Forks(Int8Tokens, ForkingCache):
    """Copies a partial block at the fork. It is right."""


class Int8Compaction(Int8Tokens, CompactingCache):
    """Moves the last blocks to the first unused ones. It is right."""


class Int8Swaps(Int8Tokens, SwapCache):
    """Swaps out codes and scales. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.space_keys, self.space_values = map(torch.zeros_like, (self.keys, self.values))
        self.space_scales = tuple(map(torch.zeros_like, self.scales()))

    def copy_out(self, leaving: Transfer) -> None:
        super().copy_out(leaving)
        self.copy_scales_out(leaving)

    def copy_scales_out(self, leaving: Transfer) -> None:
        for space, scales in zip(self.space_scales, self.scales(), strict=True):
            space[:, leaving.space] = scales[:, leaving.blocks]

    def copy_in(self, coming: Transfer) -> None:
        super().copy_in(coming)
        self.copy_scales_in(coming)

    def copy_scales_in(self, coming: Transfer) -> None:
        for space, scales in zip(self.space_scales, self.scales(), strict=True):
            scales[:, coming.blocks] = space[:, coming.space]


class Int8Tiers(Int8Texts, WriteThroughCache):
    """Stores codes and scales in a second tier. It is right."""

    block_sizes = (2, 4, 1)
    head_dims = (4,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        layers, _, heads, size = self.key_scales.shape
        self.second_scales = torch.zeros(2, layers, self.SLOTS, heads, size)

    def copy(self, copy: SlotCopy, arrived: int) -> None:
        super().copy(copy, arrived)
        blocks, slots = copy.blocks[:arrived], copy.slots[:arrived]
        for scales, other in zip(self.scales(), self.second_scales, strict=True):
            if copy.ids:
                self.load_scales(scales, blocks, other[:, slots])
            else:
                self.store_scales(other, slots, scales[:, blocks])

    def load_scales(self, scales: torch.Tensor, blocks: list[int], stored: torch.Tensor) -> None:
        scales[:, blocks] = stored

    def store_scales(self, other: torch.Tensor, slots: list[int], scales: torch.Tensor) -> None:
        other[:, slots] = scales


class ForksWithoutScales(Int8Forks):
    """T22: copies the partial block of a fork without its scales."""

    def copy(self, source: int, target: int) -> None:
        ForkingCache.copy(self, source, target)


class CompactsWithoutScales(Int8Compaction):
    """T22: moves blocks to close gaps without their scales."""

    def copy(self, source: int, target: int) -> None:
        CompactingCache.copy(self, source, target)


class SwapsOutWithoutScales(Int8Swaps):
    """T22: swaps out codes without their scales."""

    def copy_scales_out(self, leaving: Transfer) -> None:
        """Do nothing."""


class SwapsInTheScalesOfKeys(Int8Swaps):
    """T22: swaps in the scales of keys, and not those of values."""

    def copy_scales_in(self, coming: Transfer) -> None:
        self.key_scales[:, coming.blocks] = self.space_scales[0][:, coming.space]


class StoresWithoutScales(Int8Tiers):
    """T22: stores codes in a second tier without their scales."""

    def store_scales(self, other: torch.Tensor, slots: list[int], scales: torch.Tensor) -> None:
        """Do nothing."""


class LoadsTheScalesOfFormerBlocks(Int8Tiers):
    """T22: loads codes, which are read with the scales of the blocks' former holders."""

    def load_scales(self, scales: torch.Tensor, blocks: list[int], stored: torch.Tensor) -> None:
        """Do nothing."""


RIGHT = (Int8Forks, Int8Compaction, Int8Swaps, Int8Tiers)
BROKEN = (
    ForksWithoutScales,
    CompactsWithoutScales,
    SwapsOutWithoutScales,
    SwapsInTheScalesOfKeys,
    StoresWithoutScales,
    LoadsTheScalesOfFormerBlocks,
)
