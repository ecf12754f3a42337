"""Caches with keys and values in one tensor: a right one, and ones that read another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .truncating_caches import CutCache

if TYPE_CHECKING:
    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


class Interleaved(CutCache):
    """Stores slots before heads, with key and value of an element side by side. It is right."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        layers, blocks, heads, size, dim = self.keys.shape
        self.both = torch.zeros(layers, blocks, size, heads, dim, 2)
        self.keys, self.values = self.both.transpose(2, 3).unbind(-1)

    def gather(self, seq: int, layer: int) -> Pair:
        tokens = self.both[layer, self.tables[seq]].flatten(0, 1)[: self.lengths[seq]]
        return self.split(tokens)

    def split(self, both: torch.Tensor) -> Pair:
        """Split ``[tokens, heads, head_dim, 2]`` into keys and values."""
        return both[..., 0], both[..., 1]


class ReadsHalves(Interleaved):
    """S10: reads all keys before all values, as in LMCache 4463."""

    def split(self, both: torch.Tensor) -> Pair:
        keys, values = both.flatten(2).chunk(2, 2)
        return keys, values


class ReadsHeadsFirst(Interleaved):
    """S10: reads heads before slots, which are the same for one head."""

    def gather(self, seq: int, layer: int) -> Pair:
        layers, blocks, size, heads, dim, _ = self.both.shape
        other = self.both.view(layers, blocks, heads, size, dim, 2).transpose(2, 3)
        return self.split(other[layer, self.tables[seq]].flatten(0, 1)[: self.lengths[seq]])


BROKEN = (ReadsHalves, ReadsHeadsFirst)
