"""The work of one step as counts in groups, and the verdict on it when it has a baseline."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

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
    summed: bool = False
    """Only the sum of the counts is compared, and those that rose explain it."""


GROUPS: Mapping[str, Group] = {
    # Python versions differ in what they call: since 3.12 a comprehension is no call.
    "python_calls": Group("Python calls", PYTHON, summed=True),
    # Releases of torch and of libraries differ in the operations that they use.
    "operations": Group("torch operations", TORCH),
    "allocations": Group("device allocations", TORCH),
    "host_to_device": Group("copies to the device", TORCH),
    "device_to_host": Group("copies to the host", TORCH),
    "synchronisations": Group("waits for the device", TORCH),
    # The code under test does these itself.
    "triton_launches": Group("Triton launches", NOTHING),
    "graph_replays": Group("CUDA graph replays", NOTHING),
    "counters": Group("counters of its own", NOTHING),
    # A step whose bytes are counted has these groups alone.
    "weights": Group("bytes of weights", TORCH, summed=True),
    "keys_and_values": Group("bytes of keys and values", TORCH, summed=True),
    "activations": Group("bytes of all else", TORCH, summed=True),
    "not_counted": Group("what moves bytes that are not counted", TORCH),
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


class CostVerdict(NamedTuple):
    """What a step does more of than its baseline, and what less, in lines of words."""

    worse: list[str]
    """Counts that rose, or must not drop and did: these fail the step."""
    less: list[str]


def judge(now: StepWork, was: StepWork, must_not_drop: Collection[str]) -> CostVerdict:
    """Compare a step with its baseline; the counters named in ``must_not_drop`` must not fall."""
    if now.tokens != was.tokens:
        raise CannotCompare(
            f"the step brings {now.tokens} tokens, and its baseline is of {was.tokens}: their "
            "work says nothing about each other"
        )
    require_counters(must_not_drop, {*now.groups["counters"], *was.groups["counters"]})
    verdict = CostVerdict([], [])
    for name, group in GROUPS.items():
        new, old = now.groups[name], was.groups[name]
        if group.summed:
            _judge_sum(verdict, group.title, new, old, now.tokens)
            continue
        for each, count, baseline in changed_counts(new, old):
            line = f"{group.title}, {each}: {count}, baseline {baseline}"
            # With fewer graph replays, something else does their work.
            must_stay = name == "graph_replays" or (name == "counters" and each in must_not_drop)
            if count > baseline or must_stay:
                verdict.worse.append(line)
            else:
                verdict.less.append(f"less: {line}")
    return verdict


def require_counters(must_not_drop: Collection[str], known: Collection[str]) -> None:
    """Raise where ``must_not_drop`` names a counter that there is not."""
    if unknown := sorted({*must_not_drop} - {*known}):
        raise CannotCompare(
            f"must_not_drop names no counter of the step: {', '.join(unknown)}. "
            f"counters= returned {', '.join(sorted(known)) or 'none'}"
        )


def _judge_sum(
    verdict: CostVerdict, title: str, new: Mapping[str, int], old: Mapping[str, int], tokens: int
) -> None:
    """Judge only the sum of the counts; those that rose explain it."""
    now, was = sum(new.values()), sum(old.values())
    line = f"{title}: " + ", baseline ".join(
        f"{count} a step, {count / tokens:g} a token" for count in (now, was)
    )
    if now < was:
        verdict.less.append(f"less: {line}")
    elif now > was:
        grew = [each for each in changed_counts(new, old) if each[1] > each[2]]
        grew.sort(key=lambda each: each[2] - each[1])
        verdict.worse.append(line)
        verdict.worse.extend(f"    {name}: {rose}, baseline {base}" for name, rose, base in grew)


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
