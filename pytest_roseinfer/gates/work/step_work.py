"""The work of one step as counts in groups, and the versions that each group depends on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
