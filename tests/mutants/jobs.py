"""Jobs for worker processes and their outcomes, as lines of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pytest_roseinfer.settings import PROFILES
from tests.mutants.mutant import Mutant

PROFILE = "ci"
"""Default profile of searches for planted bugs."""
HUNT = "hunt"
"""The search of a user's run."""
SHRINK = "shrink"
"""The same search, with shrinking."""
RANDOM = "random"
"""Random operations, as many as the hunt with the same seed needed."""
EXAMPLES = "examples"
"""Tests by example."""
DIRECTED = "directed"
"""Check of code that no history can reach; all checks on an unbroken copy."""


@dataclass(frozen=True, slots=True)
class Task:
    """One attempt at finding the bug, in a process of its own."""

    kind: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """Attempts on one broken copy of the package; no mutant means an unbroken copy."""

    mutant: Mutant | None
    targets: tuple[str, ...]
    tasks: tuple[Task, ...]
    examples: int = PROFILES[PROFILE].examples
    steps: int = PROFILES[PROFILE].steps

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant else f"no bug in {', '.join(self.targets)}"

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Job:
        data = json.loads(line)
        data["tasks"] = tuple(Task(**task) for task in data["tasks"])
        data["targets"] = tuple(data["targets"])
        if data["mutant"]:
            data["mutant"] = Mutant.from_json(data["mutant"])
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one task."""

    mutant: str
    """Name of the job."""
    kind: str
    seed: int
    killed: bool = False
    check: str = ""
    """Name of the check that failed."""
    message: str = ""
    """Message of the check, or the end of the process."""
    examples: int = 0
    operations: int = 0
    seconds: float = 0.0

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        return cls(**json.loads(line))
