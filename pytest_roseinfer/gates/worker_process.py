"""The processes that time a step, started in pairs, each on CPUs of its own, and their clocks."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Pair = tuple["Worker", "Worker"]


_WORKER = Path(__file__).with_name("worker.py")
_PATIENCE = 10
"""A worker gets so many seconds to end by itself."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker reports once its step is built."""

    tokens: int
    """A step brings so many."""
    floor_seconds: float | None
    """A step cannot take less; None if the factory does not say."""
    own_modules: Sequence[str]
    """Top-level modules that were imported from the side's tree."""
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Side:
    """The name of a side and the folders of its code."""

    label: str
    roots: tuple[str, ...]
    shared: tuple[str, ...] = ()
    """Folders of this project, for what the side lacks: the file of the benchmark, say."""


class LacksStep(CannotCompare):
    """A side does not have the function that makes the step, or what that function imports."""

    def __init__(self, side: Side, what: str) -> None:
        super().__init__(f"{side.label}: {what}")
        self.side = side


class Worker(Protocol):
    """The part of a worker that a comparison needs; tests bring others."""

    @property
    def ready(self) -> Ready: ...

    def seconds(self, steps: int) -> list[float]: ...

    def path_counts(self) -> dict[str, int]: ...

    def stop(self) -> None: ...


class WorkerProcess:
    """A worker starts at once and is ready later, so that two can start at the same time."""

    def __init__(
        self, side: Side, factory: str, *, file: str = "", cuda: bool = False, cpus: Sequence[int]
    ) -> None:
        """``factory`` is ``module:function``, and ``file`` stands in for a module the side lacks.

        The process keeps to ``cpus``, if there are any.
        """
        self._side = side
        asked = {"factory": factory, "file": file, "cuda": cuda, "cpus": cpus, "roots": side.roots}
        # Padding moves the stack, which lies below the environment: the length of a path alone
        # would otherwise make every step of one side a percent slower.
        padding = "x" * random.randrange(4096)
        paths = os.pathsep.join([*side.roots, *side.shared])
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps(asked)],
            env=os.environ | {"PYTHONPATH": paths, "ROSEINFER_PADDING": padding},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def ready(self) -> Ready:
        """Wait until the step is built."""
        answer = self._answer()
        if not answer["own_modules"]:
            raise CannotCompare(
                f"{self._side.label}: nothing was imported from {', '.join(self._side.roots)}, "
                "so this would not measure it"
            )
        if "lacks" in answer:
            raise LacksStep(self._side, answer["lacks"])
        return Ready(**answer)

    def seconds(self, steps: int) -> list[float]:
        return list(self._ask(steps))

    def path_counts(self) -> dict[str, int]:
        return dict(self._ask(0))

    def stop(self) -> None:
        try:
            self._process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, steps: int) -> Any:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the answer says why, or there is none
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise CannotCompare(f"{self._side.label}: its worker ended with no answer")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise CannotCompare(f"{self._side.label}: {answer['error']}")
        return answer


def cpus_for(
    pair: int, wanted: int | None, available: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the CPUs that both workers of a pair keep to, or none if they may use all.

    Two workers on two CPUs would compare the CPUs, since one may share its core with somebody
    busy. Every pair has other CPUs than the one before, so that none of them decides.
    """
    available = _usable() if available is None else available
    if wanted is None or wanted >= len(available):
        return ()
    first = pair * wanted
    return tuple(available[(first + at) % len(available)] for at in range(wanted))


def pairs_side_by_side(wanted: int | None, available: Sequence[int] | None = None) -> int:
    """Return how many pairs find CPUs that no other of them keeps to."""
    available = _usable() if available is None else available
    return max(1, len(available) // wanted) if wanted else 1


def _usable() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


# Pairs of workers start at the same time, each on CPUs of its own.
#
# Starting takes most of a comparison: a process that imports torch takes seconds to be ready, and
# its series a tenth of one. All that were started are ready before one is measured, and wait for
# their turn without doing anything, so they take nothing from it.


MOST_PAIRS = 2
"""Each has two models in memory."""


@contextmanager
def started_ahead(start: Callable[[int], Pair], pairs: int) -> Iterator[Callable[[int], Pair]]:
    """Yield what hands out the pairs of ``start`` by their numbers, and starts so many at a time.

    Those that nobody has taken in the end are stopped.
    """
    waiting: deque[Pair] = deque()

    def take(number: int) -> Pair:
        if not waiting:
            for ahead in range(pairs):
                waiting.append(start(number + ahead))
            for there, here in waiting:
                _ = here.ready, there.ready  # what neither side has is misspelt, and not new
        return waiting.popleft()

    try:
        yield take
    finally:
        for worker in (worker for pair in waiting for worker in pair):
            worker.stop()


# Clocks tell whether a processor changed its speed while something was timed on it.
#
# Whatever slows both sides alike cancels, so a busy machine is no reason for doubt. A processor
# that is too hot for its clock is one: it slows down the side that makes it work harder.


_CPUS = Path("/sys/devices/system/cpu")
_CPU_DOUBTS = {
    "cpu[0-9]*/thermal_throttle/*_throttle_count": "a CPU was throttled",
    "cpu[0-9]*/cpufreq/scaling_max_freq": "the highest clock of a CPU was changed",
}
"""What it means that the content of these files changed."""
_QUERY = "--query-gpu=clocks.sm,utilization.gpu,clocks_throttle_reasons.active"
_EVERY_MS = 200
_BUSY = 20
"""From this utilization on, in percent, a GPU's clock is the one it works at."""
_SPREAD = 0.05
_REASONS = {
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "its power supply",
}
"""Bits of NVML's clock event reasons under which a GPU runs slower than it was set to."""


class CpuClock:
    """Reads what Linux says about the CPUs; in a virtual machine that is mostly nothing."""

    def __init__(self, folder: Path = _CPUS) -> None:
        self._folder = folder
        self._before = self._read()

    def doubt(self) -> str:
        """Return why times taken since this was made cannot be trusted, or ""."""
        now = self._read()
        return next((_CPU_DOUBTS[each] for each in now if now[each] != self._before[each]), "")

    def _read(self) -> dict[str, list[str]]:
        return {
            pattern: [file.read_text() for file in sorted(self._folder.glob(pattern))]
            for pattern in _CPU_DOUBTS
        }


class GpuClock:
    """Samples with ``nvidia-smi``, which runs beside the timed step and never waits for it."""

    def __init__(self, gpu: int) -> None:
        self._samples: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._sampler: subprocess.Popen[str] | None = None
        if command := shutil.which("nvidia-smi"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            name = visible.split(",")[gpu] if visible else str(gpu)
            self._sampler = subprocess.Popen(
                [command, "-i", name, _QUERY, "--format=csv,noheader,nounits", f"-lms={_EVERY_MS}"],
                stdout=self._samples,
                text=True,
            )

    def doubt(self) -> str:
        """Stop sampling, and return why the times cannot be trusted, or ""."""
        if self._sampler:
            self._sampler.terminate()
            self._sampler.wait()
        with self._samples:
            self._samples.seek(0)
            return doubt_about(self._samples)


def doubt_about(samples: Iterable[str]) -> str:
    """Judge lines of nvidia-smi; those that lack a number or are half a line say nothing."""
    clocks = []
    for line in samples:
        try:
            mhz, utilization, reasons = line.split(",")
            clock, busy, bits = int(mhz), int(utilization) >= _BUSY, int(reasons, 16)
        except ValueError:
            continue
        if busy:
            clocks.append(clock)
            for bit, reason in _REASONS.items():
                if bits & bit:
                    return f"the GPU ran at {clock} MHz because of {reason}"
    if clocks and max(clocks) > (1 + _SPREAD) * min(clocks):
        return f"the GPU's clock went from {min(clocks)} to {max(clocks)} MHz"
    return ""
