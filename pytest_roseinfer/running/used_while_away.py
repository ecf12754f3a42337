"""Counts how often others got the blocks of sequences that were to come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


@dataclass(slots=True)
class UsedWhileAway:
    tables: Mapping[int, Sequence[int | None]] = field(default_factory=dict)
    """As they were after the latest step."""
    given_up: dict[int, set[int | None]] = field(default_factory=dict)
    """For each sequence that is away and has no blocks: those that it had."""

    def met(self, away: Collection[int], tables: Mapping[int, Sequence[int | None]]) -> int:
        """Count the blocks that came to somebody in this step."""
        gone = [seq for seq in away if seq not in tables]
        self.given_up = {seq: self.given_up.get(seq, set(self.tables.get(seq, ()))) for seq in gone}
        came = _held(tables) - _held(self.tables)
        self.tables = tables
        return len(came & set[int | None]().union(*self.given_up.values()))


def _held(tables: Mapping[int, Sequence[int | None]]) -> set[int | None]:
    return {block for table in tables.values() for block in table}
