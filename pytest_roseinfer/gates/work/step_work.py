"""The work of one step as counts in groups, and the verdict on it when it has a baseline."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

PYTHON = "python"
TORCH = "torch"
NOTHING = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Counts of one kind."""

    title: str
    depends_on: str
    """A baseline holds for one version of this, since another counts differently. ``TORCH``
    includes everything that a test names in ``keyed_by``."""
    as_sum: bool = False
    """Only the sum is judged; the single counts explain it."""
    must_not_drop: bool = False
    """A smaller count fails too: something else does the work."""


GROUPS: Mapping[str, Group] = {
    # What is a call changes: since 3.12 a comprehension is none.
    "python_calls": Group("Python calls", PYTHON, as_sum=True),
    # Which operations a call is made of, and which a library calls, changes with releases.
    "operations": Group("torch operations", TORCH),
    "allocations": Group("device allocations", TORCH),
    "host_to_device": Group("copies to the device", TORCH),
    "device_to_host": Group("copies to the host", TORCH),
    "synchronisations": Group("waits for the device", TORCH),
    # The code under test does these itself.
    "triton_launches": Group("Triton launches", NOTHING),
    "graph_replays": Group("CUDA graph replays", NOTHING, must_not_drop=True),
    "counters": Group("counters of its own", NOTHING),
}


@dataclass(frozen=True, slots=True)
class StepWork:
    tokens: int
    """The step brings so many."""
    groups: Mapping[str, Mapping[str, int]]
    """For each group, how often each thing in it happened."""


def changed_counts(
    new: Mapping[str, int], old: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield the name of every count that differs, and the count in both."""
    for name in sorted({*new, *old}):
        if new.get(name, 0) != old.get(name, 0):
            yield name, new.get(name, 0), old.get(name, 0)


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


def versions_here(keyed_by: Sequence[str]) -> Mapping[str, str]:
    """Return this run's version of each thing that counts can depend on.

    Only major and minor versions matter: a patch release that changes a count has a regression.
    """
    libraries = [f"{name} {_minor(name)}" for name in ("torch", *keyed_by)]
    return {
        PYTHON: f"python {sys.version_info.major}.{sys.version_info.minor}",
        TORCH: ", ".join(libraries),
        NOTHING: "any version",
    }


def _minor(distribution: str) -> str:
    try:
        return ".".join(metadata.version(distribution).split(".")[:2])
    except metadata.PackageNotFoundError:
        raise CannotCompare(f"keyed_by names {distribution}, which is not installed") from None
