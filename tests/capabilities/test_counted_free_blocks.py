"""A cache's own count of its free blocks is held to those that are free."""

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
        manager.num_free_blocks = one_less(manager.num_free_blocks)


class PoolCountsTooFew(PagedAttentionCacheAdapter):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.cache.pool.count_free_blocks = one_less(self.cache.pool.count_free_blocks)


def one_less(counted: Callable[[int], int]) -> Callable[[int], int]:
    return lambda which: counted(which) - 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (GroupedManager, ManagerCountsTooFew),
        (PagedAttentionCacheAdapter, PoolCountsTooFew),
    ],
)
def test_a_wrong_count_is_found(right: type[KVCacheAdapter], wrong: type[KVCacheAdapter]) -> None:
    run_history(right, HISTORY)
    with pytest.raises(Divergence, match=r"layer 0: the cache counts \d free blocks, and has \d"):
        run_history(wrong, HISTORY)
