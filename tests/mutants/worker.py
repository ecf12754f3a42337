"""Process that plants bugs and searches for them: reads jobs, writes outcomes.

Importing torch, Triton and Hypothesis takes seconds, so this process does it once. Every broken
copy is imported in a fork of it, and every task on the copy runs in a fork of that one: a bug that
corrupts memory, hangs or crashes affects no other task.

Its arguments are the id of the process that started it, which it must not outlive, and a folder for
the copies.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.settings import Settings
from tests.mutants.forking import in_child
from tests.mutants.install import import_from, plant
from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, RANDOM, SHRINK, Job, Outcome, Task
from tests.mutants.runner import DONE
from tests.mutants.tally import Tally

if TYPE_CHECKING:
    from typing import TextIO

    from tests.mutants.hunt import Failure

_LEAST_OPERATIONS = 40
"""Least number of random operations, if the search needed fewer."""


def main() -> None:
    runner, folder = int(sys.argv[1]), sys.argv[2]
    # Keep other output out of the stream of outcomes.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from tests.mutants.warm import warm_up

    warm_up()
    for line in sys.stdin:
        try:
            _do(Job.from_line(line), Path(tempfile.mkdtemp(dir=folder)), answers, runner)
        except Exception:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        else:
            answers.write(DONE + "\n")


def _do(job: Job, folder: Path, answers: TextIO, runner: int) -> None:
    plant(job.mutant, folder)
    in_child(lambda: _try_all(job, folder, answers, runner))


def _try_all(job: Job, folder: Path, answers: TextIO, runner: int) -> str:
    sys.dont_write_bytecode = True
    import_from(folder)
    from pytest_roseinfer.adapters.load_target import load_target

    targets = [load_target(name) for name in job.targets]
    bench = _Bench(job, targets, runner)
    for task in job.tasks:
        answers.write(bench.outcome(task).to_line() + "\n")
    return ""


@dataclass(slots=True)
class _Bench:
    """One imported copy and its tasks."""

    job: Job
    targets: list[type[Any]]
    runner: int
    operations_needed: int = 0
    """Operations of the last hunt, and at least the minimum."""

    def outcome(self, task: Task) -> Outcome:
        tally = Tally()
        start = time.perf_counter()
        ended = in_child(lambda: self._attempt(task, tally).to_line(), watch=self.runner)
        if ended.ended_by:
            outcome = Outcome(
                self.job.name, task.kind, task.seed, killed=True, check=tally.check,
                message=f"the process was ended by {ended.ended_by}",
                seconds=time.perf_counter() - start,
            )  # fmt: skip
        else:
            outcome = Outcome.from_line(ended.answer)
        outcome = replace(outcome, examples=tally.examples, operations=tally.operations)
        if task.kind == HUNT:
            self.operations_needed = max(outcome.operations, _LEAST_OPERATIONS)
        return outcome

    def _attempt(self, task: Task, tally: Tally) -> Outcome:
        start = time.perf_counter()
        failure = self._failure(task, tally)
        outcome = Outcome(self.job.name, task.kind, task.seed, seconds=time.perf_counter() - start)
        if failure is None:
            return outcome
        return replace(outcome, killed=True, check=failure.check, message=failure.message[:500])

    def _failure(self, task: Task, tally: Tally) -> Failure | None:
        from pytest_roseinfer.adapters.engine import EngineAdapter
        from tests.mutants import directed, hunt

        job = self.job
        engines = [target for target in self.targets if issubclass(target, EngineAdapter)]
        search_settings = Settings(
            examples=job.examples,
            steps=job.steps,
            search_seconds=0,  # results count examples, also on a busy machine
            seed=task.seed,
            targets=job.targets,
        )
        if task.kind == HUNT:
            return hunt.hunt(self.targets, search_settings, tally)
        if task.kind == SHRINK:
            from tests.mutants import shrinking

            return shrinking.shrink(self.targets, search_settings, tally)
        if task.kind == DIRECTED:
            return directed.run(job.mutant.directed if job.mutant else None, tally)
        if task.kind == RANDOM:
            from tests.mutants import random_operations, random_requests

            if engines:
                return random_requests.run(engines, task.seed, self.operations_needed, tally)
            return random_operations.run(self.targets, task.seed, self.operations_needed, tally)
        if task.kind == EXAMPLES:
            from tests.mutants import engine_examples, examples

            return engine_examples.run(tally) if engines else examples.run(tally)
        raise ValueError(f"unknown kind of task: {task.kind!r}")


if __name__ == "__main__":
    main()
