"""Caches that keep keys and values in one tensor, and some that read it with another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .truncating_caches import CutCache

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


class Interleaved(CutCache):
    """Slots come before heads, and an element's key and value lie side by side. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        layers, blocks, heads, size, dim = self.keys.shape
        self.both = torch.zeros(layers, blocks, size, heads, dim, 2)
        self.keys, self.values = self.both.transpose(2, 3).unbind(-1)

    def gather(self, seq: int, layer: int) -> Pair:
        found = self.both[layer, self.tables[seq]].flatten(0, 1)[: self.lengths[seq]]
        return self.apart(found)

    def apart(self, both: torch.Tensor) -> Pair:
        """Take ``[tokens, heads, head_dim, 2]`` apart."""
        return both[..., 0], both[..., 1]


class ReadsHalves(Interleaved):
    """S10: its reader takes all keys to come before all values, as in LMCache 4463."""

    def apart(self, both: torch.Tensor) -> Pair:
        keys, values = both.flatten(2).chunk(2, 2)
        return keys, values


class ReadsHeadsFirst(Interleaved):
    """S10: its reader takes heads to come before slots, where both are right for one head."""

    def gather(self, seq: int, layer: int) -> Pair:
        layers, blocks, size, heads, dim, _ = self.both.shape
        other = self.both.view(layers, blocks, heads, size, dim, 2).transpose(2, 3)
        return self.apart(other[layer, self.tables[seq]].flatten(0, 1)[: self.lengths[seq]])


BROKEN = (ReadsHalves, ReadsHeadsFirst)
