"""How many planted bugs each profile is known to find, a measurement that ships with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.running import coverage
from pytest_roseinfer.settings import PROFILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.settings import Settings

FILE = Path(__file__).with_name("strength.json")
"""Only ``python -m tests.mutants --write-docs`` writes it."""
_RELIABLY = 0.9
"""A bug counts as found by a profile when at least this share of the seeds found it."""


@dataclass(frozen=True, slots=True)
class Strength:
    """The result of one hunt for every planted bug."""

    profile: str
    planted: int
    seeds: int
    missed: Mapping[str, int]
    """The bugs that some seed missed, and how many seeds found each."""
    version: str
    """The version of roseinfer that was measured."""
    date: str

    @classmethod
    def of(cls, profile: str) -> Strength | None:
        """Read what was measured of a profile, if anything was."""
        measured = _read().get(profile)
        return cls(**measured) if measured else None

    @property
    def unreliable(self) -> Mapping[str, int]:
        """The bugs that too many seeds missed."""
        least = _RELIABLY * self.seeds
        return {name: found for name, found in self.missed.items() if found < least}

    @property
    def found(self) -> int:
        return self.planted - len(self.unreliable)

    def write(self) -> None:
        measured = {**_read(), self.profile: asdict(self)}
        FILE.write_text(json.dumps(measured, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        of_seeds = f"each of {self.seeds}"
        if self.missed:
            of_seeds = f"at least {_RELIABLY:.0%} of {self.seeds}"
        left_out = "".join(
            f"; {name} with {found} of them" for name, found in self.unreliable.items()
        )
        return (
            f"when it was last measured (roseinfer {self.version}, {self.date}), on roseinfer's "
            f"own engine and caches, {self.profile} found {self.found} of {self.planted} planted "
            f"bugs with {of_seeds} seeds{left_out}"
        )


def how_strong(asked: Settings, *, cut_short: bool) -> str:
    """Say how much a search as asked is known to find, and one that was not cut short."""
    usual = PROFILES[asked.profile]
    if asked.endpoint:
        return "not measured for a server"
    if cut_short:
        return "not measured: some searches ended before they had tried all examples"
    if (asked.examples, asked.steps) != (usual.examples, usual.steps):
        return f"not measured: {asked.examples} examples in place of {usual.examples}"
    measured = Strength.of(asked.profile)
    return str(measured) if measured else f"not measured for the profile {asked.profile}"


class Searched:
    """A plugin of a run that says behind it how hard it looked, and how much that finds."""

    def __init__(self, asked: Settings) -> None:
        self._asked = asked
        self._histories = 0
        self._cut_short = False

    def pytest_terminal_summary(self) -> None:
        """Look at what the run and its workers saw, while it is there."""
        targets = coverage.current().targets.values()
        self._histories = sum(target.histories for target in targets)
        self._cut_short = any(target.cut_short for target in targets)

    def in_words(self, seconds: float) -> str:
        return (
            f"Looked at {self._histories} histories and mixes of requests in {seconds:.0f} s, "
            f"profile {self._asked.profile}.\n"
            f"How much such a look finds: {how_strong(self._asked, cut_short=self._cut_short)}."
        )


def _read() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return measured
