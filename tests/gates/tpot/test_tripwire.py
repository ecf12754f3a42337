"""The tripwire as another project meets it, on a GPU that takes as long as a step says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import against, benchmarks, engine, marked, there

if TYPE_CHECKING:
    from tests.project import Project

BASELINE = "--roseinfer-tpot=tpot.json"


def test_it_is_about_gpus(project: Project) -> None:
    project.write(engine=engine(1000), test_speed=marked())
    result = project.pytest(BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--roseinfer-tpot: needs a GPU; add --roseinfer-gpu*"])


TORCH = """
    # A GPU that takes as long as a step says; waiting for it in every step would show.
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
def on_a_gpu(project: Project) -> Project:
    project.from_cold = True  # with a torch of its own
    project.write(torch=TORCH, engine=GPU_ENGINE.format(microseconds=1000), test_speed=marked())
    project.pytest("--roseinfer-gpu", BASELINE, "--roseinfer-update-tpot").assert_outcomes(passed=1)
    return project


def test_it_holds_a_step_to_the_time_of_its_gpu(on_a_gpu: Project) -> None:
    steps = json.loads((on_a_gpu.path / "tpot.json").read_text())["steps"]
    assert steps == {"test_speed.py::test_decode": {"Imaginary GPU": {"tpot_us": 1000.0}}}
    result = on_a_gpu.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_speed.py::test_decode: within its baseline in *tpot.json"])
    on_a_gpu.write(engine=GPU_ENGINE.format(microseconds=1200))
    result = on_a_gpu.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a step on Imaginary GPU: 1200.0 us, baseline 1000.0 us in *"])


def test_it_takes_its_time_as_it_did_after_a_comparison_too(on_a_gpu: Project) -> None:
    """If a step grows, its time depends on how many are measured."""
    growing = GPU_ENGINE.format(microseconds='(1000 + 10 * counts["steps"])')
    growing = growing.replace("MICROSECONDS = ", "MICROSECONDS = lambda counts: ")
    growing = growing.replace("+= MICROSECONDS", "+= MICROSECONDS(counts)")
    there(on_a_gpu, 1)
    on_a_gpu.write(**{"engine": growing, "before/engine": growing})
    on_a_gpu.pytest("--roseinfer-gpu", BASELINE, "--roseinfer-update-tpot")
    result = against(on_a_gpu, "--roseinfer-gpu", BASELINE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_speed.py::test_decode: within its baseline in *tpot.json"])


def test_it_says_nothing_about_another_gpu(on_a_gpu: Project) -> None:
    on_a_gpu.write(torch=TORCH.replace("Imaginary GPU", "Better GPU"))
    result = on_a_gpu.pytest("--roseinfer-gpu", BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no time of this step on Better GPU, only on Imaginary GPU*"])


def test_one_that_held_nothing_fails_the_run(on_a_gpu: Project) -> None:
    on_a_gpu.write(test_speed="def test_other(): pass")
    result = on_a_gpu.pytest("--roseinfer-gpu", BASELINE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED: --roseinfer-tpot: no test of this run compared *"])


def test_a_gpu_is_timed_by_events_and_waited_for_once_in_a_turn(on_a_gpu: Project) -> None:
    there(on_a_gpu, 1)
    on_a_gpu.write(**{"before/engine": GPU_ENGINE.format(microseconds=500)})
    _, here = benchmarks(on_a_gpu, "--roseinfer-gpu", BASELINE)
    assert here["extra_info"]["ratio"] == pytest.approx(2)
    assert here["extra_info"]["device"] == "Imaginary GPU"
    counts = here["extra_info"]["path_counts"]
    assert counts["waits"] < counts["steps"] / 3
