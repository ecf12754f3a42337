"""A hash function whose values collide all the time, for caches that take one."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

_VALUES = 4


@dataclass(slots=True)
class LookupHashes:
    """The hashes that one lookup needs."""

    things: set[str] = field(default_factory=set)
    collided: bool = False
    """Another thing got one of its hashes before, in a step."""

    def may_miss(self, blocks: int) -> bool:
        """Return True if a lookup that found so many blocks may have missed one by its hash.

        A cache that hashes less than it looks for remembers hashes, and nobody knows which.
        """
        return self.collided or len(self.things) <= blocks


@dataclass(slots=True)
class Collisions:
    """Hashes to one of four values, and counts different things that get the same one."""

    seen: int = 0
    _hashed: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The things that steps hashed, by value. A lookup stores nothing under its hashes."""
    _lookup: LookupHashes | None = None

    def hashed(self, thing: object) -> int:
        said = repr(thing)
        value = crc32(said.encode()) % _VALUES
        alike = self._hashed[value]
        collides = bool(alike - {said})
        self.seen += collides
        if self._lookup:
            self._lookup.things.add(said)
            self._lookup.collided |= collides
        else:
            alike.add(said)
        return value

    @contextmanager
    def lookup(self) -> Iterator[LookupHashes]:
        """Record what is hashed inside as a lookup's."""
        self._lookup = LookupHashes()
        try:
            yield self._lookup
        finally:
            self._lookup = None

    @property
    def any(self) -> bool:
        """True once two things that steps hashed got the same value."""
        return any(len(alike) > 1 for alike in self._hashed.values())

    def take(self) -> int:
        """Return how often it happened since this was last asked."""
        seen, self.seen = self.seen, 0
        return seen
