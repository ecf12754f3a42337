"""Hands jobs to worker processes and collects what they find."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.mutants.jobs import Job

DONE = "done"
"""The line that ends a job's outcomes; a line of JSON with an error in it ends them early."""
_Answer = Outcome | Exception | None
_ROOT = Path(__file__).parents[2]
"""The worker is found from here, as ``tests.mutants.worker``."""


class WorkerFailed(RuntimeError):
    """A worker could not do a job, which says nothing about the bug."""


def run(jobs: Sequence[Job], *, processes: int) -> Iterator[Outcome]:
    """Do the jobs in parallel and yield outcomes as they come."""
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="roseinfer-mutants-") as folder:
        workers = [_Worker(folder, todo, answers) for _ in range(min(processes, len(jobs)))]
        try:
            busy = len(workers)
            while busy:
                answer = answers.get()
                if answer is None:
                    busy -= 1
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    yield answer
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """One worker process and the thread that talks to it."""

    def __init__(
        self,
        folder: str,
        todo: queue.SimpleQueue[Job],
        answers: queue.SimpleQueue[_Answer],
    ) -> None:
        self._todo, self._answers = todo, answers
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in end)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker", str(os.getpid()), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            cwd=_ROOT,
            text=True,
            # More threads than one would only wait for each other on tensors this small.
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while True:
                self._do(self._todo.get_nowait())
        except queue.Empty:
            self._answers.put(None)
        except Exception as error:
            self._answers.put(error)

    def _do(self, job: Job) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):  # what it said is read below
            stdin.write(job.to_line() + "\n")
            stdin.flush()
        for line in stdout:
            if line.strip() == DONE:
                return
            answer = json.loads(line)
            if "error" in answer:
                raise self._failed(job, answer["error"])
            self._answers.put(Outcome(**answer))
        raise self._failed(job, f"it ended with status {self._process.wait()}")

    def _failed(self, job: Job, why: str) -> WorkerFailed:
        self._complaints.seek(0)
        said = self._complaints.read()[-4000:]
        name = job.name or "the unbroken copy"
        return WorkerFailed(f"the worker could not do {name}: {why}\n{said}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self._complaints.close()
