"""The verdict on a step's work: what it does more of than its baseline, and what less."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.step_work import GROUPS, changed_counts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_roseinfer.gates.work.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Change:
    """A count that differs from its baseline."""

    what: str
    now: int | str
    was: int | str
    grew: tuple[Change, ...] = ()
    """For a sum, the single counts that rose."""

    def __str__(self) -> str:
        return f"{self.what}: {self.now}, baseline {self.was}"


@dataclass(frozen=True, slots=True)
class CostVerdict:
    worse: list[Change] = field(default_factory=list)
    """These fail the step: they rose, or they must not drop and did."""
    less: list[Change] = field(default_factory=list)

    def in_words(self) -> list[str]:
        """Return a line for each change, the worse ones first."""
        lines = []
        for change in self.worse:
            lines += [str(change), *(f"    {grew}" for grew in change.grew)]
        return lines + [f"less: {change}" for change in self.less]


def judge(now: StepWork, was: StepWork, must_not_drop: Collection[str]) -> CostVerdict:
    """Compare a step with its baseline; the counters named in ``must_not_drop`` must not fall."""
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
            rose = sum(new.values()) - sum(old.values())
            if rose:
                worse_or_less = verdict.worse if rose > 0 else verdict.less
                worse_or_less.append(_change_of_sum(group.title, new, old, now.tokens))
            continue
        for each, count, baseline in changed_counts(new, old):
            must_stay = group.must_not_drop or (name == "counters" and each in must_not_drop)
            worse_or_less = verdict.worse if count > baseline or must_stay else verdict.less
            worse_or_less.append(Change(f"{group.title}, {each}", count, baseline))
    return verdict


def _change_of_sum(
    title: str, new: Mapping[str, int], old: Mapping[str, int], tokens: int
) -> Change:
    now, was = (
        f"{count} a step, {count / tokens:g} a token"
        for count in (sum(new.values()), sum(old.values()))
    )
    grew = [each for each in changed_counts(new, old) if each[1] > each[2]]
    grew.sort(key=lambda each: each[2] - each[1])
    return Change(title, now, was, tuple(Change(*each) for each in grew))
