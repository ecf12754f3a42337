"""The tripwire in a user's project, on a simulated GPU whose time a step sets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import (
    benchmarks,
    engine,
    run_against,
    speed_test,
    write_reference,
)

if TYPE_CHECKING:
    from tests.project import Project

BASELINE = "--roseinfer-tpot=tpot.json"


def test_tripwire_needs_a_gpu(project: Project) -> None:
    project.write(engine=engine(1000), test_speed=speed_test())
    result = project.pytest(BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--roseinfer-tpot: needs a GPU; add --roseinfer-gpu*"])


TORCH = """
    # A GPU whose time a step sets; a synchronisation in every step would show in its counts.
    waits = 0


    class cuda:
        now = 0.0
        is_available = is_initialized = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        get_device_name = staticmethod(lambda index=0: "Imaginary GPU")

        @staticmethod
        def synchronize():
            global waits
            waits += 1

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def elapsed_time(self, later):
                return 1000 * (later.at - self.at)
"""
GPU_ENGINE = """
    import torch

    MICROSECONDS = {microseconds}


    def decode():
        counts = {{"steps": 0}}

        def step():
            counts["steps"] += 1
            torch.cuda.now += MICROSECONDS / 1e6

        return {{
            "step": step,
            "tokens": 4,
            "path_counts": lambda: {{**counts, "waits": torch.waits}},
        }}
"""


@pytest.fixture
def gpu_project(project: Project) -> Project:
    project.cold_start = True  # with its own torch
    project.write(torch=TORCH, engine=GPU_ENGINE.format(microseconds=1000), test_speed=speed_test())
    project.pytest("--roseinfer-gpu", BASELINE, "--roseinfer-update-tpot").assert_outcomes(passed=1)
    return project


def test_tripwire_fails_beyond_the_baseline_of_the_gpu(gpu_project: Project) -> None:
    steps = json.loads((gpu_project.path / "tpot.json").read_text())["steps"]
    assert steps == {"test_speed.py::test_decode": {"Imaginary GPU": {"tpot_us": 1000.0}}}
    result = gpu_project.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_speed.py::test_decode: within its baseline in *tpot.json"])
    gpu_project.write(engine=GPU_ENGINE.format(microseconds=1200))
    result = gpu_project.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a step on Imaginary GPU: 1200.0 us, baseline 1000.0 us in *"])


@pytest.mark.slow
def test_tripwire_times_a_growing_step_equally_after_a_comparison(gpu_project: Project) -> None:
    """The time of a growing step depends on the number of steps measured before."""
    growing = GPU_ENGINE.format(microseconds='(1000 + 10 * counts["steps"])')
    growing = growing.replace("MICROSECONDS = ", "MICROSECONDS = lambda counts: ")
    growing = growing.replace("+= MICROSECONDS", "+= MICROSECONDS(counts)")
    write_reference(gpu_project, 1)
    gpu_project.write(**{"engine": growing, "before/engine": growing})
    gpu_project.pytest("--roseinfer-gpu", BASELINE, "--roseinfer-update-tpot")
    result = run_against(gpu_project, "--roseinfer-gpu", BASELINE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_speed.py::test_decode: within its baseline in *tpot.json"])


@pytest.mark.slow
def test_tripwire_fails_without_a_time_of_the_gpu(gpu_project: Project) -> None:
    gpu_project.write(torch=TORCH.replace("Imaginary GPU", "Better GPU"))
    result = gpu_project.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no time of this step on Better GPU, only on Imaginary GPU*"])


@pytest.mark.slow
def test_tripwire_that_compares_nothing_fails_the_run(gpu_project: Project) -> None:
    gpu_project.write(test_speed="def test_other(): pass")
    result = gpu_project.pytest("--roseinfer-gpu", BASELINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: --roseinfer-tpot: no test of this run compared *"])


@pytest.mark.slow
def test_gpu_is_timed_by_events_with_one_synchronisation_per_turn(gpu_project: Project) -> None:
    write_reference(gpu_project, 1)
    gpu_project.write(**{"before/engine": GPU_ENGINE.format(microseconds=500)})
    _, here = benchmarks(gpu_project, "--roseinfer-gpu", BASELINE)
    assert here["extra_info"]["ratio"] == pytest.approx(2)
    assert here["extra_info"]["device"] == "Imaginary GPU"
    counts = here["extra_info"]["path_counts"]
    assert counts["waits"] < counts["steps"] / 3
