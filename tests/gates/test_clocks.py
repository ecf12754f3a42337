"""What counts as a processor that changed its speed."""

from __future__ import annotations

import fnmatch
import os
import time
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.worker_process import CpuClock, GpuClock, doubt_about

if TYPE_CHECKING:
    from pathlib import Path


def cpu(folder: Path, throttled: int = 0, allowed: int = 3_000_000) -> None:
    for name, number in {
        "cpu0/thermal_throttle/core_throttle_count": throttled,
        "cpu0/cpufreq/scaling_max_freq": allowed,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{number}\n")


def test_a_cpu_that_stays_as_it_is_leaves_no_doubt(tmp_path: Path) -> None:
    cpu(tmp_path, throttled=7)
    assert CpuClock(tmp_path).doubt() == ""
    assert CpuClock(tmp_path / "a machine that says nothing").doubt() == ""


def test_a_cpu_that_was_throttled(tmp_path: Path) -> None:
    cpu(tmp_path)
    clock = CpuClock(tmp_path)
    cpu(tmp_path, throttled=1)
    assert clock.doubt() == "a CPU was throttled"


def test_a_cpu_whose_highest_clock_was_changed(tmp_path: Path) -> None:
    cpu(tmp_path)
    clock = CpuClock(tmp_path)
    cpu(tmp_path, allowed=2_000_000)
    assert clock.doubt() == "the highest clock of a CPU was changed"


IDLE = "210, 0, 0x0000000000000001"
BUSY = "1980, 97, 0x0000000000000000"


@pytest.mark.parametrize(
    ("lines", "doubt"),
    [
        ([], ""),
        ([IDLE, BUSY, BUSY, IDLE], ""),
        ([BUSY, "[N/A], 97, 0x0000000000000004", "1200, 9"], ""),  # no number, and half a line
        ([BUSY, "1965, 60, 0x0000000000000000"], ""),
        ([BUSY, "1700, 60, 0x0000000000000000"], "the GPU's clock went from 1700 to 1980 MHz"),
        ([BUSY, "1700, 60, 0x0000000000000004"], "the GPU ran at 1700 MHz because of its power *"),
        ([BUSY, "1200, 60, 0x0000000000000040"], "the GPU ran at 1200 MHz because of its temp*"),
        ([BUSY, "1980, 60, 0x0000000000000002"], ""),  # set by its owner, and constant
    ],
)
def test_a_gpu_is_judged_by_what_it_did_while_busy(lines: list[str], doubt: str) -> None:
    assert fnmatch.fnmatch(doubt_about(lines), doubt)


def test_samples_come_from_nvidia_smi_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{BUSY}'\necho \"$@\" > {tmp_path}/asked\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    clock = GpuClock(1)
    asked = tmp_path / "asked"
    for _ in range(500):
        if asked.exists() and asked.read_text():
            break
        time.sleep(0.02)
    assert clock.doubt() == ""
    assert asked.read_text().startswith("-i 6 --query-gpu=clocks.sm,")


def test_no_nvidia_smi_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert GpuClock(0).doubt() == ""
