"""Outcomes kept in a file, so that a hunt that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tests.mutants.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.mutants.jobs import Job


class KeptError(ValueError):
    """The file is of another hunt."""


class KeptOutcomes:
    """A file with a line for the hunt, and one for each outcome and the seconds until then.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, hunt: str) -> None:
        self._path, self._hunt = path, hunt
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0
        """Duration of the hunt so far, over all runs."""
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        first, *lines = path.read_text().splitlines() or [""]
        if first != self._hunt:
            raise KeptError(f"{path} is of another hunt: {first or 'it is empty'}")
        for line in lines:
            if not line.endswith("}"):  # the run was ended while it wrote this line
                break
            entry = json.loads(line)
            self.seconds = entry.pop("elapsed")
            self.outcomes.append(Outcome(**entry))

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without all outcomes, and forget the outcomes that these have.

        A job is done again as a whole: how long random operations run depends on its search.
        """
        had = {(outcome.mutant, outcome.kind, outcome.seed) for outcome in self.outcomes}
        left = [
            job
            for job in jobs
            if not all((job.name, task.kind, task.seed) in had for task in job.tasks)
        ]
        again = {job.name for job in left}
        self.outcomes = [outcome for outcome in self.outcomes if outcome.mutant not in again]
        return left

    def keep(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Yield the outcomes, each after it was kept."""
        start = time.perf_counter() - self.seconds
        if self._path is not None:
            self._rewrite(self._path)
        for outcome in outcomes:
            self.outcomes.append(outcome)
            self.seconds = time.perf_counter() - start
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(self._line(outcome))
            yield outcome

    def _rewrite(self, path: Path) -> None:
        """Write the file without the outcomes that were forgotten."""
        path.write_text("".join([f"{self._hunt}\n", *map(self._line, self.outcomes)]))

    def _line(self, outcome: Outcome) -> str:
        return json.dumps({"elapsed": self.seconds, **json.loads(outcome.to_line())}) + "\n"
