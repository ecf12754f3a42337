"""Distribution of jobs to worker processes, and collection of their outcomes."""

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
"""Line after a job's outcomes; a line of JSON with an error ends them early."""
_Answer = Outcome | Exception | None
_ROOT = Path(__file__).parents[2]
"""Folder in which the worker runs, as ``tests.mutants.worker``."""


class WorkerFailed(RuntimeError):
    """A worker failed to run a job, so that there is no result for the bug."""


def run(jobs: Sequence[Job], *, processes: int) -> Iterator[Outcome]:
    """Do the jobs in parallel and yield outcomes as they come."""
    jobs_left: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        jobs_left.put(job)
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="roseinfer-mutants-") as folder:
        workers = [_Worker(folder, jobs_left, answers) for _ in range(min(processes, len(jobs)))]
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
        jobs_left: queue.SimpleQueue[Job],
        answers: queue.SimpleQueue[_Answer],
    ) -> None:
        self._jobs, self._answers = jobs_left, answers
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in end)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker", str(os.getpid()), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
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
                self._do(self._jobs.get_nowait())
        except queue.Empty:
            self._answers.put(None)
        except Exception as error:
            self._answers.put(error)

    def _do(self, job: Job) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):  # its messages are read below
            stdin.write(job.to_line() + "\n")
            stdin.flush()
        for line in stdout:
            if line.strip() == DONE:
                return
            answer = json.loads(line)
            if "error" in answer:
                raise self._failed(job, answer["error"])
            self._answers.put(Outcome(**answer))
        raise self._failed(job, f"exit status {self._process.wait()}")

    def _failed(self, job: Job, reason: str) -> WorkerFailed:
        self._stderr.seek(0)
        messages = self._stderr.read()[-4000:]
        return WorkerFailed(f"worker failed on {job.name}: {reason}\n{messages}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self._stderr.close()
