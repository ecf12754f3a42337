"""What transformers' paged cache shows of its storage, and of who holds which block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.cache import Ledger

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.adapters.cache import CacheSpec

SURPLUS = "surplus"
"""A request that never ends has the blocks by which the size was rounded up to whole sectors."""


def storage(cache: Any, spec: CacheSpec, dtype: torch.dtype, allocator: Any) -> torch.Tensor:
    """View the whole cache as ``[blocks, layers of this kind, 2, page, heads, head_dim]``."""
    shape = spec.block_size, spec.num_heads, spec.head_dim
    stored: torch.Tensor = cache.cache_tensor.view(dtype)
    return stored.view(-1, len(allocator.layer_indices), 2, *shape)


def ledger_of(pool: Any, allocator: Any) -> Ledger:
    size, books = allocator.blocks_per_sector, allocator.ledger
    first = pool.num_reserved_sectors * size
    blocks = set(range(first, first + allocator.num_blocks))
    blocks -= set(allocator.block_table[SURPLUS])
    # The pool shows how many blocks of the sectors in use are free, but not which.
    trees = pool._free_blocks[allocator.index].trees.values()
    free = [block for tree in trees for block in tree]
    not_counted = len(free) - pool.count_free_blocks(allocator.index)
    for sector in pool.free_sectors:
        free += range(sector * size, (sector + 1) * size)
    # Full blocks that nobody holds stay filled until room is needed.
    free += books.cached_blocks
    held = blocks - set(free)
    counts = {block: books.shared_ref_counts.get(block, 1) for block in held}
    return Ledger(counts, free, len(blocks), num_free=len(free) - not_counted)
