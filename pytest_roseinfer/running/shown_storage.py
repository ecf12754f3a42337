"""The storage of a cache that shows it: poisoned where nobody reads, and copied for snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.findings.observation import Pair, Snapshot

STORED = ("arena", "scales")
"""The methods that show a part of it."""


class Storage:
    def __init__(self, adapter: KVCacheAdapter) -> None:
        self.adapter = adapter
        for part in self._live():
            poison(part)

    def _live(self) -> list[torch.Tensor]:
        sharded = "shards" in self.adapter.abilities
        ranks: Sequence[KVCacheAdapter] = self.adapter.shards() if sharded else [self.adapter]
        shown = [_shown(rank, name) for rank in ranks for name in STORED]
        return [part for pair in shown for part in pair or ()]

    def shown(self, *, copied: bool) -> list[Pair | None]:
        """Return what each of the methods shows, or a copy of that."""
        pairs = [_shown(self.adapter, name) for name in STORED]
        return [(pair[0].clone(), pair[1].clone()) if pair and copied else pair for pair in pairs]

    def poison(self, layer: int, block: int, shown: Snapshot) -> None:
        """Overwrite a block that nobody will read, in the cache and in a snapshot of it."""
        for part in (*self._live(), *(shown.arena or ()), *(shown.scales or ())):
            poison(part[layer, block])


def _shown(adapter: KVCacheAdapter, name: str) -> Pair | None:
    return getattr(adapter, name)() if name in adapter.abilities else None
