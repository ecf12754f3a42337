"""A side's worker, as seen from the process that compares: started, told to run steps, ended."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WORKER = Path(__file__).with_name("worker.py")
_PADDING = "ROSEINFER_PADDING"
_PATIENCE = 10
"""Seconds a worker gets to end by itself once nothing more is asked of it."""


class CannotMeasure(Exception):
    """There is nothing to be timed; the message says which side and why."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The facts that a worker reports once its step is built."""

    tokens: int
    """A step brings so many."""
    floor_seconds: float | None
    """A step cannot take less; None where the factory does not say."""
    own_modules: tuple[str, ...]
    """Top-level modules it imported from its side's tree."""
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Side:
    """The folders of a side's code, and its name."""

    label: str
    roots: tuple[str, ...]
    """Folders of its own that modules are imported from, ahead of all others."""
    shared: tuple[str, ...] = ()
    """Folders of this project, for what the side lacks: the file of the benchmark, say."""


@dataclass(frozen=True, slots=True)
class Job:
    """The step that a worker is to run, and the CPUs it runs on."""

    factory: str
    """``module:function``."""
    file: str = ""
    """The module's file on this side, for a side that has none."""
    cuda: bool = False
    cpus: tuple[int, ...] = ()
    """It keeps to these; empty for all."""


class Worker(Protocol):
    """The part of a worker that a comparison needs; tests bring others."""

    @property
    def ready(self) -> Ready: ...

    def seconds(self, steps: int) -> list[float]: ...

    def path_counts(self) -> dict[str, int]: ...

    def stop(self) -> None: ...


class WorkerProcess:
    """Starts at once and is ready later, so that two can start at the same time."""

    def __init__(self, side: Side, job: Job) -> None:
        self._side = side
        asked = {**asdict(job), "roots": side.roots}
        paths = [*side.roots, *side.shared]
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps(asked)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), _PADDING: _padding()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ready: Ready | None = None

    @property
    def ready(self) -> Ready:
        if self._ready is None:
            ready = Ready(**self._answer())
            if not ready.own_modules:
                raise CannotMeasure(
                    f"{self._side.label}: nothing was imported from {', '.join(self._side.roots)}, "
                    "so this would be no measurement of it"
                )
            self._ready = replace(ready, own_modules=tuple(ready.own_modules))
        return self._ready

    def seconds(self, steps: int) -> list[float]:
        taken: list[float] = self._ask(steps)
        return taken

    def path_counts(self) -> dict[str, int]:
        counts: dict[str, int] = self._ask(0)
        return counts

    def stop(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, steps: int) -> Any:
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why shows in the answer, or in that there is none
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise CannotMeasure(f"{self._side.label}: its worker ended with no answer")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise CannotMeasure(f"{self._side.label}: {answer['error']}")
        return answer


def _padding() -> str:
    """Moves the stack of a process, which lies below its environment.

    The length of a path alone would otherwise make one side's every step a percent slower.
    """
    return "x" * random.randrange(4096)


def cpus_for(series: int, wanted: int | None, available: Sequence[int]) -> tuple[int, ...]:
    """The CPUs that both workers of one series keep to; empty for wherever they like.

    Two workers on two CPUs would compare the CPUs: one may share its core with somebody busy.
    Every series has others, so that none of them decides.
    """
    if wanted is None or wanted >= len(available):
        return ()
    first = series * wanted
    return tuple(available[(first + at) % len(available)] for at in range(wanted))


def cpus_here() -> list[int]:
    """List the CPUs that this process may use; none where the system does not let it choose."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
