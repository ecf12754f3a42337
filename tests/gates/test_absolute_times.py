"""The tripwire: absolute times of steps on named GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.paired_timing import (
    Plan,
    Timings,
    describe_excess,
    measure_alone,
    update,
)
from tests.gates.simulated import READY, SimulatedWorker, quiet

if TYPE_CHECKING:
    from pathlib import Path

GPU = "NVIDIA H200"
TEST = "test_speed.py::test_decode"


def timings(microseconds: float, device: str = GPU) -> Timings:
    return Timings(replace(READY, device=device), series_tpot=[microseconds / 1e6] * 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tpot.json"
    update(file, TEST, timings(1000))
    return file


def test_tripwire_reports_times_beyond_the_tolerance(file: Path) -> None:
    assert describe_excess(timings(1099), file, TEST) == ""
    assert describe_excess(timings(500), file, TEST) == ""
    message = f"a step on {GPU}: 1120.0 us, baseline 1000.0 us in {file}, which is 12% more; "
    assert describe_excess(timings(1120), file, TEST).startswith(message)


def test_other_gpus_and_tests_have_no_baseline(file: Path) -> None:
    with pytest.raises(CannotCompare, match="no time of this step on NVIDIA L4, only on NVIDIA H"):
        describe_excess(timings(1000, "NVIDIA L4"), file, TEST)
    with pytest.raises(CannotCompare, match="only on no GPU"):
        describe_excess(timings(1000), file, "test_speed.py::test_other")
    file.unlink()
    with pytest.raises(
        CannotCompare, match=r"^--roseinfer-tpot: .*json does not exist; .* writes it"
    ):
        describe_excess(timings(1000), file, TEST)


def test_update_keeps_baselines_of_other_gpus_and_tests(file: Path) -> None:
    update(file, TEST, timings(3000, "NVIDIA L4"))
    update(file, "other", timings(7))
    update(file, TEST, timings(900))
    steps = json.loads(file.read_text())["steps"]
    assert steps == {
        TEST: {GPU: {"tpot_us": 900.0}, "NVIDIA L4": {"tpot_us": 3000.0}},
        "other": {GPU: {"tpot_us": 7.0}},
    }


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 2, "steps": {}}'])
def test_invalid_baseline_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tpot.json"
    file.write_text(text)
    with pytest.raises(CannotCompare, match=file.name):
        describe_excess(timings(1000), file, TEST)
    assert file.read_text() == text


def test_step_is_timed_alone_in_several_processes() -> None:
    workers = []

    def start(_: int) -> SimulatedWorker:
        workers.append(SimulatedWorker(quiet(), 2e-3))
        return workers[-1]

    timings_alone = measure_alone(Plan(), start)
    assert timings_alone.series_tpot == pytest.approx([2e-3] * 3)
    assert len(timings_alone.turns) == 3 * 2 * Plan().rounds
    assert len(workers) == 3
    assert all(worker.stopped for worker in workers)
