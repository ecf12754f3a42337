"""Caches that can be built in few shapes, and caches that are wrong in some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .paged_cache import PagedCache

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer import CacheSpec


class FewShapes(PagedCache):
    """Is right in the shapes that it lists, and cannot be built in others."""

    dtypes = ("bfloat16",)
    head_counts = (8, 12)
    head_dims = (128, 64)
    block_sizes = (16, 32)

    def make(self, spec: CacheSpec) -> None:
        assert spec.dtype in self.dtypes
        assert spec.num_heads in self.head_counts
        assert spec.head_dim in self.head_dims
        assert spec.block_size in self.block_sizes
        super().make(spec)


class CutsHeadsAt128(PagedCache):
    """Zeroes the elements of a head beyond the 128 that one tile of its kernel holds."""

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        key[..., 128:] = value[..., 128:] = 0
        super().write(blocks, positions, key, value)


class MasksPositions(PagedCache):
    """Takes a position by a bit mask, which is wrong for blocks of one token."""

    block_sizes = (16, 2, 4, 1, 8)

    def position(self, seq: int) -> int:
        return self.lengths[seq] & max(1, self.spec.block_size - 1)
