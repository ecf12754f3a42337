"""A cache's own count of its free blocks must equal the length of its free list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.targets.paged_attention_cache import PagedAttentionCacheAdapter
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer import KVCacheAdapter

HISTORY = History(CacheSpec(options={"triton": False}), (Append((0, 1)), Free(0), Append((1,))))


class ManagerCountsTooFew(GroupedManager):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        manager: Any = self.manager
        manager.num_free_blocks = minus_one(manager.num_free_blocks)


class PoolCountsTooFew(PagedAttentionCacheAdapter):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.cache.pool.count_free_blocks = minus_one(self.cache.pool.count_free_blocks)


def minus_one(count_free_blocks: Callable[[int], int]) -> Callable[[int], int]:
    return lambda layer: count_free_blocks(layer) - 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (GroupedManager, ManagerCountsTooFew),
        (PagedAttentionCacheAdapter, PoolCountsTooFew),
    ],
)
def test_wrong_count_of_free_blocks_fails(
    right: type[KVCacheAdapter], wrong: type[KVCacheAdapter]
) -> None:
    run_history(right, HISTORY)
    with pytest.raises(Divergence, match=r"layer 0: the cache counts \d free blocks, and has \d"):
        run_history(wrong, HISTORY)
