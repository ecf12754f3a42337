"""When the blocks that a cache keeps for later texts were released, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_roseinfer.findings.contents import Contents


@dataclass(frozen=True, slots=True)
class Released:
    """A block that nobody holds any more, and that a text may find."""

    step: int
    """The step in which its last holder let go of it."""
    at: int
    """Which block of its last holders it was; the head of a sequence is 0."""
    holders: frozenset[int] = frozenset()
    tokens: tuple[int, ...] = ()

    def goes_before(self, other: Released) -> bool:
        """Return True if it must be evicted first: released earlier, or nearer to the tail."""
        if self.step != other.step:
            return self.step < other.step
        return self.at > other.at and bool(self.holders & other.holders)


def released_of(
    earlier: Mapping[int, Released],
    tables: Mapping[int, Sequence[int | None]],
    cached: Collection[int],
    contents: Contents,
    step: int,
) -> dict[int, Released]:
    """Return what is ``cached`` after a step; what was not ``earlier`` was released in it.

    The tables and contents are those from before the step.
    """
    found: dict[int, Released] = {}
    for block in cached:
        if block in earlier:
            found[block] = earlier[block]
            continue
        at = {seq: table.index(block) for seq, table in tables.items() if block in table}
        tokens = tuple(contents.get(block, ()))
        found[block] = Released(step, max(at.values(), default=0), frozenset(at), tokens)
    return found
