"""Caches without counts that declare conditions which the harness counts."""

from __future__ import annotations

from typing import ClassVar

from pytest_roseinfer import FastPath, KVCacheAdapter

from .list_cache import ListCache
from .paged_cache import PagedCache

ALL = ("last_position", "out_of_room_mid_batch", "name_used_again")


class UncountedCache(PagedCache):
    paths: ClassVar[dict[str, FastPath]] = {}
    conditions = ALL
    path_counts = KVCacheAdapter.path_counts  # not offered


class EndlessCache(ListCache):
    """Is never out of room, and declares that it is."""

    conditions = ALL[:2]


class NeverFreesCache(ListCache):
    """Frees no sequence, and declares that names are reused."""

    conditions = ALL[2:]


class CountsAHarnessCondition(PagedCache):
    conditions = ("new_block", "last_position")

    def free(self, seq: int) -> None:
        super().free(seq)
        self.counts["last_position"] += 1
