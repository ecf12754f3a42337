"""A step's work held against its baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.work.step_work import GROUPS, CannotCompare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pytest_roseinfer.gates.work.step_work import Group, StepWork


@dataclass(frozen=True, slots=True)
class Change:
    """One count that is not what it was."""

    kind: str
    name: str
    """Empty for the sum of all of its kind."""
    now: int
    was: int
    tokens: int | None = None
    """The tokens of the step, where the count is to be shown for each of them too."""

    def __str__(self) -> str:
        what = ", ".join(filter(None, (self.kind, self.name)))
        now, was = (self._count(count) for count in (self.now, self.was))
        return f"{what}: {now}, baseline {was}"

    def _count(self, count: int) -> str:
        return f"{count} a step, {count / self.tokens:g} a token" if self.tokens else str(count)


@dataclass(slots=True)
class CostVerdict:
    """The changes of a step: what it does more of, what less, and which Python functions grew."""

    worse: list[Change] = field(default_factory=list)
    """These fail the step: they rose, or must not drop and did."""
    less: list[Change] = field(default_factory=list)
    grew: list[Change] = field(default_factory=list)

    def note(self, change: Change, *, must_not_drop: bool = False) -> None:
        (self.worse if change.now > change.was or must_not_drop else self.less).append(change)

    def note_sum(
        self, group: Group, new: Mapping[str, int], old: Mapping[str, int], tokens: int
    ) -> None:
        now, was = sum(new.values()), sum(old.values())
        if now != was:
            self.note(Change(group.title, "", now, was, tokens))
        grew = [change for change in _single("", new, old) if change.now > change.was]
        self.grew += sorted(grew, key=lambda change: change.was - change.now)

    def in_words(self) -> list[str]:
        """A line for each change, the worse first."""
        lines = []
        for change in self.worse:
            lines.append(str(change))
            if change.tokens:
                lines += [f"    {function}" for function in self.grew]
        return lines + [f"less: {change}" for change in self.less]


def judge(now: StepWork, was: StepWork, must_not_drop: Collection[str]) -> CostVerdict:
    """``must_not_drop`` are counters of the code's own of which fewer is a loss."""
    if now.tokens != was.tokens:
        raise CannotCompare(
            f"the step brings {now.tokens} tokens, and its baseline is of {was.tokens}: their "
            "work says nothing about each other"
        )
    if unknown := set(must_not_drop) - {*now.groups["counters"], *was.groups["counters"]}:
        raise CannotCompare(f"must_not_drop names no counter of the step: {sorted(unknown)}")
    verdict = CostVerdict()
    for name, group in GROUPS.items():
        new, old = now.groups[name], was.groups[name]
        if group.as_sum:
            verdict.note_sum(group, new, old, now.tokens)
            continue
        kept = {*new, *old} if group.must_not_drop else must_not_drop if name == "counters" else ()
        for change in _single(group.title, new, old):
            verdict.note(change, must_not_drop=change.name in kept)
    return verdict


def _single(kind: str, new: Mapping[str, int], old: Mapping[str, int]) -> Iterator[Change]:
    for name in sorted({*new, *old}):
        if new.get(name, 0) != old.get(name, 0):
            yield Change(kind, name, new.get(name, 0), old.get(name, 0))
