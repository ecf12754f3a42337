"""These clocks tell if a processor changed its speed while something was timed on it.

What both sides meet alike cancels, which is why the rest of a busy machine is no reason for
doubt. A processor too hot for its clock is: it slows down whoever makes it work harder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CPUS = Path("/sys/devices/system/cpu")
_THROTTLED = "cpu[0-9]*/thermal_throttle/*_throttle_count"
_ALLOWED = "cpu[0-9]*/cpufreq/scaling_max_freq"
_QUERY = "--query-gpu=clocks.sm,utilization.gpu,clocks_throttle_reasons.active"
_EVERY_MS = 200
_BUSY = 20
"""Percent of utilization from which a GPU's clock is one it works at."""
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
    """Asks Linux about the CPUs; a virtual machine is told nothing, and doubts nothing."""

    def __init__(self, folder: Path = _CPUS) -> None:
        self._folder = folder
        self._before = self._read(_THROTTLED), self._read(_ALLOWED)

    def doubt(self) -> str:
        """Say why times taken since this was made are no good; empty if they are good."""
        throttled, allowed = self._before
        if self._read(_THROTTLED) != throttled:
            return "a CPU was throttled"
        if self._read(_ALLOWED) != allowed:
            return "the highest clock of a CPU was changed"
        return ""

    def _read(self, pattern: str) -> dict[str, str]:
        return {str(file): file.read_text() for file in sorted(self._folder.glob(pattern))}


class GpuClock:
    """Samples of ``nvidia-smi``, which runs beside what is timed and never waits for it."""

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
        """End the sampling, and say the same of a GPU."""
        if self._sampler:
            self._sampler.terminate()
            self._sampler.wait()
        self._samples.seek(0)
        lines = self._samples.read().splitlines()
        self._samples.close()
        return doubt_about([sample for line in lines if (sample := Sample.read(line))])


@dataclass(frozen=True, slots=True)
class Sample:
    mhz: int
    utilization: int
    reasons: int

    @classmethod
    def read(cls, line: str) -> Sample | None:
        """Read a line of nvidia-smi; None if it knew no number, or wrote half the line."""
        cells = [cell.strip() for cell in line.split(",")]
        try:
            mhz, utilization, reasons = cells
            return cls(int(mhz), int(utilization), int(reasons, 16))
        except ValueError:
            return None


def doubt_about(samples: Sequence[Sample]) -> str:
    busy = [sample for sample in samples if sample.utilization >= _BUSY]
    for sample in busy:
        for bit, reason in _REASONS.items():
            if sample.reasons & bit:
                return f"the GPU ran at {sample.mhz} MHz because of {reason}"
    clocks = [sample.mhz for sample in busy]
    if busy and max(clocks) > (1 + _SPREAD) * min(clocks):
        return f"the GPU's clock went from {min(clocks)} to {max(clocks)} MHz"
    return ""
