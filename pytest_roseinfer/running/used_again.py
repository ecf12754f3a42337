"""Counts how often a cache gives out again what it had given out and got back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_roseinfer.running.used_while_away import UsedWhileAway

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from pytest_roseinfer.cases.operations.operation import Driven
    from pytest_roseinfer.findings.observation import Snapshot


@dataclass(slots=True)
class _GivenOut:
    """Things of one kind."""

    now: set[Hashable] = field(default_factory=set)
    ever: dict[Hashable, object] = field(default_factory=dict)
    """Holding them keeps new things from getting the identity of one that is gone."""

    def again(self, things: Iterable[object]) -> int:
        """Take the things that are given out now; count those that are so once more."""
        shown = {_identity(thing): thing for thing in things}
        again = sum(each in self.ever and each not in self.now for each in shown)
        self.now = set(shown)
        self.ever.update(shown)
        return again


def _identity(thing: object) -> Hashable:
    return thing if isinstance(thing, int | str) else ("the object", id(thing))


@dataclass(slots=True)
class UsedAgain:
    """The handles, slots, lists and blocks of one cache."""

    handles: _GivenOut = field(default_factory=_GivenOut)
    slots: _GivenOut = field(default_factory=_GivenOut)
    lists: _GivenOut = field(default_factory=_GivenOut)
    blocks: UsedWhileAway = field(default_factory=UsedWhileAway)

    def met(self, driven: Driven, shown: Snapshot, away: Collection[int]) -> Counter[str]:
        """Count the conditions that the latest step met."""
        kept = shown.kept.values()
        return Counter(
            handle_used_again=self.handles.again(handle for handle, _ in driven.reserved),
            slot_used_again=self.slots.again(each for each in kept if isinstance(each, int)),
            list_used_again=self.lists.again(each for each in kept if isinstance(each, list)),
            block_used_while_away=self.blocks.met(away, shown.tables_of(0)),
        )
