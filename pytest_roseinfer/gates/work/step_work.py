"""What one step did, as counts in groups, and which versions each group depends on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PYTHON = "python"
TORCH = "torch"
NOTHING = ""


class CannotCompare(Exception):
    """There are no two numbers that could be held against each other."""


@dataclass(frozen=True, slots=True)
class Group:
    """Counts of one kind."""

    title: str
    depends_on: str
    """The version that decides about them beside the code under test: a baseline holds for it
    alone. ``TORCH`` stands for everything a test names in ``keyed_by`` too."""
    why: str
    """The reason why they depend on it, or on nothing."""
    as_sum: bool = False
    """Only their sum is judged; the single counts say where it comes from."""
    must_not_drop: bool = False
    """Fewer of them means that something else does the work."""


GROUPS: Mapping[str, Group] = {
    "python_calls": Group(
        "Python calls",
        PYTHON,
        "what is a call changes: since 3.12 a comprehension is none",
        as_sum=True,
    ),
    "operations": Group(
        "torch operations",
        TORCH,
        "which ones a call is made of, and which a library calls, changes with their releases",
    ),
    "allocations": Group("device allocations", TORCH, "each is the result of an operation"),
    "host_to_device": Group("copies to the device", TORCH, "libraries make some"),
    "device_to_host": Group("copies to the host", TORCH, "libraries make some"),
    "synchronisations": Group("waits for the device", TORCH, "libraries make some"),
    "triton_launches": Group(
        "Triton launches", NOTHING, "the code under test launches its own kernels"
    ),
    "graph_replays": Group(
        "CUDA graph replays", NOTHING, "the code under test replays its own", must_not_drop=True
    ),
    "counters": Group("counters of its own", NOTHING, "the code under test counts them"),
}


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    tokens: int
    """The step brought so many."""
    groups: Mapping[str, Mapping[str, int]]
    """For each group that was counted, how often each thing in it happened."""

    def differing(self, other: StepWork) -> list[str]:
        """Name every count that is not the same in both, with both numbers."""
        found = []
        for group, counts in self.groups.items():
            others = other.groups[group]
            found += [
                f"{GROUPS[group].title}, {name}: {counts.get(name, 0)} and {others.get(name, 0)}"
                for name in sorted({*counts, *others})
                if counts.get(name, 0) != others.get(name, 0)
            ]
        return found


def versions_here(keyed_by: Sequence[str]) -> Mapping[str, str]:
    """For each thing that counts can depend on, what it is in this run.

    Major and minor version: what a patch release changes of this would be a regression of it.
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
