"""A hash function whose values collide all the time, for caches that take one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from zlib import crc32

_VALUES = 4


@dataclass(slots=True)
class Collisions:
    """Hashes to one of four values, and counts different things that get the same one."""

    seen: int = 0
    _hashed: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def hashed(self, thing: object) -> int:
        said = repr(thing)
        value = crc32(said.encode()) % _VALUES
        alike = self._hashed[value]
        self.seen += bool(alike - {said})
        alike.add(said)
        return value

    def take(self) -> int:
        """Return how often it happened since this was last asked."""
        seen, self.seen = self.seen, 0
        return seen
