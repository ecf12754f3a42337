"""How many blocks are free by the oracle and by the cache's books, and since when these differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_roseinfer.adapters.cache import Ledger

if TYPE_CHECKING:
    from pytest_roseinfer.findings.observation import Snapshot
    from pytest_roseinfer.oracle.oracle import Oracle


class _Free(NamedTuple):
    layer: int
    by_oracle: int
    by_ledger: int

    @property
    def differ(self) -> bool:
        return self.by_oracle != self.by_ledger


@dataclass(slots=True)
class FreeBlocks:
    """Knows both numbers after the latest step; what a later one is refused for began before."""

    _counts: list[_Free] = field(default_factory=list)
    _since: int | None = None
    """The step that made them differ."""

    def note(self, oracle: Oracle, shown: Snapshot, step: int) -> None:
        """Take what the cache shows after a step of this number."""
        self._counts = [
            _Free(layer, oracle.free_in(layer), len(ledger.free))
            for layer, ledger in enumerate(shown.ledgers)
            if isinstance(ledger, Ledger)
        ]
        if not any(each.differ for each in self._counts):
            self._since = None
        elif self._since is None:
            self._since = step

    def words(self) -> str:
        """Say both numbers of the first layer in which they differ; nothing if none is shown."""
        if not self._counts:
            return ""
        layer, *both = max(self._counts, key=lambda each: each.differ)
        since = "" if self._since is None else f", which differ since step {self._since}"
        return "; layer {}: {} free by the oracle, {} by the ledger".format(layer, *both) + since
