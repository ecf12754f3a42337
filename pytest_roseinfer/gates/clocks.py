"""Clocks tell whether a processor changed its speed while something was timed on it.

Whatever slows both sides alike cancels, so a busy machine is no reason for doubt. A processor
that is too hot for its clock is one: it slows down the side that makes it work harder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
