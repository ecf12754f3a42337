"""How many planted bugs the search is known to find: a measurement that ships with the package."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_roseinfer.running import coverage

FILE = Path(__file__).with_name("strength.json")
"""Only ``python -m tests.mutants --write-docs`` writes it."""


@dataclass(frozen=True, slots=True)
class Strength:
    """The result of one hunt for every planted bug."""

    planted: int
    found: int
    """How many of them every seed found."""
    seeds: int
    profile: str
    version: str
    """The version of roseinfer that was measured."""
    date: str

    @classmethod
    def read(cls) -> Strength:
        return cls(**json.loads(FILE.read_text(encoding="utf-8")))

    def write(self) -> None:
        FILE.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return (
            f"the profile {self.profile} finds {self.found} of {self.planted} planted bugs, each "
            f"with all of {self.seeds} seeds (roseinfer {self.version}, {self.date})"
        )


class Searched:
    """A plugin of a run that says at its end how much its searches find."""

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self.cut_short = False

    def pytest_terminal_summary(self) -> None:
        """Look at what the run and its workers saw, while it is there."""
        targets = coverage.current().targets.values()
        self.cut_short = any(target.cut_short for target in targets)

    def __str__(self) -> str:
        known = f"How much a search finds: {Strength.read()}."
        if self.cut_short:
            known = (
                "Some searches ended early, as said above, and nobody measured how much such a "
                "search finds."
            )
        return f"Searched with the profile {self.profile}. {known}"
