"""Clocks: changes of a processor's speed that put a measurement in doubt."""

from __future__ import annotations

import fnmatch
import os
import time
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.worker_process import CpuClock, GpuClock, doubt_about

if TYPE_CHECKING:
    from pathlib import Path


def cpu(folder: Path, throttle_count: int = 0, max_frequency: int = 3_000_000) -> None:
    for name, number in {
        "cpu0/thermal_throttle/core_throttle_count": throttle_count,
        "cpu0/cpufreq/scaling_max_freq": max_frequency,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{number}\n")


def test_cpu_with_constant_clock_causes_no_doubt(tmp_path: Path) -> None:
    cpu(tmp_path, throttle_count=7)
    assert CpuClock(tmp_path).doubt() == ""
    assert CpuClock(tmp_path / "a machine without these files").doubt() == ""


def test_throttled_cpu_causes_doubt(tmp_path: Path) -> None:
    cpu(tmp_path)
    clock = CpuClock(tmp_path)
    cpu(tmp_path, throttle_count=1)
    assert clock.doubt() == "a CPU was throttled"


def test_changed_maximum_clock_causes_doubt(tmp_path: Path) -> None:
    cpu(tmp_path)
    clock = CpuClock(tmp_path)
    cpu(tmp_path, max_frequency=2_000_000)
    assert clock.doubt() == "the highest clock of a CPU was changed"


IDLE = "210, 0, 0x0000000000000001"
BUSY = "1980, 97, 0x0000000000000000"


@pytest.mark.parametrize(
    ("lines", "doubt"),
    [
        ([], ""),
        ([IDLE, BUSY, BUSY, IDLE], ""),
        (
            [BUSY, "[N/A], 97, 0x0000000000000004", "1200, 9"],
            "",
        ),  # no number, and an incomplete line
        ([BUSY, "1965, 60, 0x0000000000000000"], ""),
        ([BUSY, "1700, 60, 0x0000000000000000"], "the GPU's clock went from 1700 to 1980 MHz"),
        ([BUSY, "1700, 60, 0x0000000000000004"], "the GPU ran at 1700 MHz because of its power *"),
        ([BUSY, "1200, 60, 0x0000000000000040"], "the GPU ran at 1200 MHz because of its temp*"),
        ([BUSY, "1980, 60, 0x0000000000000002"], ""),  # set by its owner, and constant
    ],
)
def test_gpu_clock_is_judged_by_its_busy_samples(lines: list[str], doubt: str) -> None:
    assert fnmatch.fnmatch(doubt_about(lines), doubt)


def test_gpu_samples_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        f"#!/bin/sh\necho '{BUSY}'\necho \"$@\" > {tmp_path}/arguments\nexec sleep 60\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    clock = GpuClock(1)
    arguments_file = tmp_path / "arguments"
    for _ in range(500):
        if arguments_file.exists() and arguments_file.read_text():
            break
        time.sleep(0.02)
    assert clock.doubt() == ""
    assert arguments_file.read_text().startswith("-i 6 --query-gpu=clocks.sm,")


def test_missing_nvidia_smi_causes_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert GpuClock(0).doubt() == ""
