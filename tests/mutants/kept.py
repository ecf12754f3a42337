"""Outcomes kept in a file, so that a hunt that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.mutants.jobs import RANDOM, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.mutants.jobs import Job, Task


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
        """Return the jobs with the tasks that have no outcome.

        How long random operations run depends on the search before them, which is done again.
        """
        had = {*map(_task, self.outcomes)}
        left = []
        for job in jobs:
            done = sum((job.name, task.kind, task.seed) in had for task in job.tasks)
            if 0 < done < len(job.tasks) and job.tasks[done].kind == RANDOM:
                done -= 1
                self._forget(job.name, job.tasks[done])
            if done < len(job.tasks):
                left.append(replace(job, tasks=job.tasks[done:]))
        return left

    def _forget(self, name: str, task: Task) -> None:
        key = (name, task.kind, task.seed)
        self.outcomes = [
            each for each in self.outcomes if (each.mutant, each.kind, each.seed) != key
        ]

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


def _task(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.mutant, outcome.kind, outcome.seed
