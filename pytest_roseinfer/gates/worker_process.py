"""Processes that time a step, started in pairs on separate CPUs, and checks of clock speeds."""

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
"""Seconds for a worker to exit by itself before it is killed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Report of a worker whose step is built."""

    tokens: int
    """Number of tokens that a step generates."""
    floor_seconds: float | None
    """Lower bound of a step's time; None if the factory has none."""
    own_modules: Sequence[str]
    """Top-level modules that were imported from the side's tree."""
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its name and the folders of its code."""

    label: str
    roots: tuple[str, ...]
    shared: tuple[str, ...] = ()
    """Folders of this project for modules that the side lacks, such as the benchmark's."""


class MissingStep(CannotCompare):
    """Error of a side that lacks the step's factory, or a module that the factory imports."""

    def __init__(self, side: Side, problem: str) -> None:
        super().__init__(f"{side.label}: {problem}")
        self.side = side


class Worker(Protocol):
    """Interface of a worker for comparisons; tests use other implementations."""

    @property
    def ready(self) -> Ready: ...

    def seconds(self, steps: int) -> list[float]: ...

    def path_counts(self) -> dict[str, int]: ...

    def stop(self) -> None: ...


class WorkerProcess:
    """Worker in a process that starts at once and is ready later, so that two start together."""

    def __init__(
        self, side: Side, factory: str, *, file: str = "", cuda: bool = False, cpus: Sequence[int]
    ) -> None:
        """Start the process.

        ``factory`` is ``module:function``; ``file`` replaces a module that the side lacks. The
        process is pinned to ``cpus``, unless they are empty.
        """
        self._side = side
        arguments = {
            "factory": factory,
            "file": file,
            "cuda": cuda,
            "cpus": cpus,
            "roots": side.roots,
        }
        # Random padding shifts the stack, which lies below the environment: otherwise the length
        # of a path alone could make every step of one side a percent slower.
        padding = "x" * random.randrange(4096)
        paths = os.pathsep.join([*side.roots, *side.shared])
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps(arguments)],
            env=os.environ | {"PYTHONPATH": paths, "ROSEINFER_PADDING": padding},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def ready(self) -> Ready:
        """Report of the built step; waits until it is built."""
        answer = self._answer()
        if not answer["own_modules"]:
            raise CannotCompare(
                f"{self._side.label}: nothing was imported from {', '.join(self._side.roots)}, "
                "so its code would not be measured"
            )
        if "lacks" in answer:
            raise MissingStep(self._side, answer["lacks"])
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
        with suppress(BrokenPipeError):  # reading the answer reports the error
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise CannotCompare(f"{self._side.label}: the worker process ended without an answer")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise CannotCompare(f"{self._side.label}: {answer['error']}")
        return answer


def cpus_for(
    pair: int, requested: int | None, available: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the CPUs that both workers of a pair are pinned to; empty if they may use all.

    Two workers on different CPUs would compare the CPUs, since one may share its core with
    another busy process. Each pair has different CPUs from the previous one, so that no single CPU
    decides.
    """
    available = _usable() if available is None else available
    if requested is None or requested >= len(available):
        return ()
    first = pair * requested
    return tuple(available[(first + at) % len(available)] for at in range(requested))


def pairs_side_by_side(requested: int | None, available: Sequence[int] | None = None) -> int:
    """Return the number of pairs that can have separate CPUs, at least 1."""
    available = _usable() if available is None else available
    return max(1, len(available) // requested) if requested else 1


def _usable() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


# Starting pairs of workers ahead of time, on separate CPUs.
#
# Startup takes most of a comparison: a process that imports torch takes seconds to be ready, and
# its series a tenth of a second. All started workers are ready before one is measured, and then
# idle until their turn, so they do not disturb it.


MAX_PAIRS = 2
"""Maximum pairs at a time; each has two models in memory."""


@contextmanager
def start_ahead(start: Callable[[int], Pair], pairs: int) -> Iterator[Callable[[int], Pair]]:
    """Yield a function that returns pairs by number, and starts ``pairs`` of them at a time.

    Pairs that were not used are stopped at the end.
    """
    waiting: deque[Pair] = deque()

    def take(number: int) -> Pair:
        if not waiting:
            for ahead in range(pairs):
                waiting.append(start(number + ahead))
            for there, here in waiting:
                # Here first: a step that neither side has is misspelt, not new.
                _ = here.ready, there.ready
        return waiting.popleft()

    try:
        yield take
    finally:
        for worker in (worker for pair in waiting for worker in pair):
            worker.stop()


# Clocks that detect changes of a processor's speed during a measurement.
#
# Slowdowns of both sides cancel, so a busy machine is no reason for doubt. A thermally throttled
# processor is: it slows down the side that makes it work harder.


_CPUS = Path("/sys/devices/system/cpu")
_CPU_DOUBTS = {
    "cpu[0-9]*/thermal_throttle/*_throttle_count": "a CPU was throttled",
    "cpu[0-9]*/cpufreq/scaling_max_freq": "the highest clock of a CPU was changed",
}
"""Reasons for doubt, by the files whose content changed."""
_QUERY = "--query-gpu=clocks.sm,utilization.gpu,clocks_throttle_reasons.active"
_EVERY_MS = 200
_BUSY = 20
"""Minimum utilization in percent for a GPU's clock to count as its working clock."""
_SPREAD = 0.05
_REASONS = {
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "its power supply",
}
"""Bits of NVML's clock event reasons that make a GPU run below its set clock."""


class CpuClock:
    """Check of CPU speeds by Linux's counters, which most virtual machines lack."""

    def __init__(self, folder: Path = _CPUS) -> None:
        self._folder = folder
        self._before = self._read()

    def doubt(self) -> str:
        """Return why times since this object's creation cannot be trusted, or ""."""
        now = self._read()
        return next((_CPU_DOUBTS[each] for each in now if now[each] != self._before[each]), "")

    def _read(self) -> dict[str, list[str]]:
        return {
            pattern: [file.read_text() for file in sorted(self._folder.glob(pattern))]
            for pattern in _CPU_DOUBTS
        }


class GpuClock:
    """Check of GPU clocks with ``nvidia-smi``, which samples in parallel to the timed step."""

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
    """Return a reason for doubt from lines of nvidia-smi, or ""; incomplete lines are skipped."""
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
