"""The storage of a cache that shows it: poisoned where nobody reads, and copied for snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.answers import checked
from pytest_roseinfer.cases.poison import Poison, poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
    from pytest_roseinfer.findings.observation import Pair, Snapshot

STORED = {"arena": (5,), "scales": (4, 3)}
"""The methods that show a part of it, and how many dimensions that may have."""


class Storage:
    def __init__(self, adapter: KVCacheAdapter, spec: CacheSpec) -> None:
        self.adapter = adapter
        self._require_shapes(spec)
        self._require_views()
        for part in self._live():
            poison(part, Poison.NEVER_WRITTEN)

    def _require_shapes(self, spec: CacheSpec) -> None:
        """Raise where what is shown is not laid out as the harness will take it to be."""
        due = {
            "layers": spec.num_layers,
            "blocks": None,  # too few are the cache's mistake, and its ledger's
            "heads": spec.num_heads,
            "block_size": spec.block_size,
            # Codes may be packed.
            "head_dim": None if spec.dtype in self.adapter.tolerance else spec.head_dim,
        }
        for name, pair in zip(STORED, self.shown(copied=False), strict=True):
            for view in pair or ():
                checked.laid_out(f"{name}()", view, due)

    def _require_views(self) -> None:
        """Raise where what is shown is not what is stored: poison would go nowhere."""
        for rank in self._ranks:
            for name in STORED:
                one, other = _shown(rank, name), _shown(rank, name)
                for view, again in zip(one or (), other or (), strict=True):
                    checked.lies_where_it_did(f"{name}()", view, again)

    @property
    def _ranks(self) -> Sequence[KVCacheAdapter]:
        sharded = "shards" in self.adapter.abilities
        return self.adapter.shards() if sharded else [self.adapter]

    def _live(self) -> list[torch.Tensor]:
        shown = [_shown(rank, name) for rank in self._ranks for name in STORED]
        return [part for pair in shown for part in pair or ()]

    def shown(self, *, copied: bool) -> list[Pair | None]:
        """Return what each of the methods shows, or a copy of that."""
        pairs = [_shown(self.adapter, name) for name in STORED]
        return [(pair[0].clone(), pair[1].clone()) if pair and copied else pair for pair in pairs]

    def poison_what_was_freed(self, before: Snapshot, after: Snapshot) -> None:
        """Overwrite what nobody will read of the blocks given back, in the cache and its copy."""
        if before.arena is None and before.scales is None:  # the device was at work
            return
        for layer in {layer for _, layer in before.tables or ()}:
            kept = {*after.ledger(layer).cached} if after.ledgers else set[int]()
            for block in before.owners(layer).keys() - after.owners(layer).keys() - kept:
                for part in (*self._live(), *(after.arena or ()), *(after.scales or ())):
                    poison(part[layer, block], Poison.FREED)


def _shown(adapter: KVCacheAdapter, name: str) -> Pair | None:
    if name not in adapter.abilities:
        return None
    return checked.storage(f"{name}()", getattr(adapter, name)(), STORED[name])
