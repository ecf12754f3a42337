"""Recorded times of steps: in a folder of the plugin's format, and as benchmarks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.history import read_runs
from tests.gates.tpot.timed_project import benchmarks, engine, run_against, write_reference

if TYPE_CHECKING:
    from tests.project import Project


@pytest.mark.slow
def test_times_are_recorded_with_plot_and_summary(
    timed_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(timed_project.path / "summary.md"))
    for microseconds in (1000, 1100):
        write_reference(timed_project, microseconds)
        run_against(timed_project, "--roseinfer-timings=kept").assert_outcomes(passed=1)
    runs = read_runs(timed_project.path / "kept")
    assert [run.times[0]["verdict"] for run in runs] == ["SAME", "FASTER"]
    assert [run.work for run in runs] == [[], []]
    assert {"python", "numpy", "cpu"} <= runs[0].environment.keys()
    here = runs[0].times[0]["here"]
    assert here["tokens_per_second"] == pytest.approx(4 / 1001e-6)
    assert here["share_of_memory_floor"] == pytest.approx(250 / 1001)
    assert here["path_counts"]["fast"] > 0
    assert (timed_project.path / "kept" / "timings.png").read_bytes().startswith(b"\x89PNG")
    summary = (timed_project.path / "summary.md").read_text()
    assert summary.count("### roseinfer: decode steps against before") == 2
    assert "FASTER" in summary


@pytest.mark.slow
def test_work_of_steps_is_recorded(timed_project: Project) -> None:
    """Results of several workers are recorded as one run."""
    timed_project.write(
        test_speed="""
            import pytest

            @pytest.mark.parametrize("size", [1, 2])
            def test_work(roseinfer_costs, size):
                roseinfer_costs.check("steady", lambda: sum(range(size)), tokens=size)
        """
    )
    timed_project.pytest("--roseinfer-timings=kept", "--roseinfer-update-costs", "-n2")
    timed_project.pytest("--roseinfer-timings=kept").assert_outcomes(passed=2)
    runs = read_runs(timed_project.path / "kept")
    for run in runs:
        assert sorted(work["tokens"] for work in run.work) == [1, 2]
        assert all(work["counts"]["python_calls"] == 2 for work in run.work)
        assert all(work["more"] == work["less"] == [] for work in run.work)
    assert len(runs) == 2


def test_run_that_records_nothing_fails(timed_project: Project) -> None:
    result = timed_project.pytest("--roseinfer-timings=kept")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: --roseinfer-timings: no test of this run timed or counted a step"]
    )


def test_both_sides_are_recorded_as_benchmarks(timed_project: Project) -> None:
    write_reference(timed_project, 1100)
    before, here = benchmarks(timed_project)
    assert [before["name"], here["name"]] == ["test_decode (there)", "test_decode"]
    assert before["group"] == here["group"]
    assert before["stats"]["median"] == pytest.approx(1101e-6, rel=1e-3)
    assert here["stats"]["median"] == pytest.approx(1001e-6, rel=1e-3)
    assert here["stats"]["rounds"] == len(here["stats"]["data"]) == 20
    info = here["extra_info"]
    assert info["verdict"] == "FASTER"
    assert info["against"] == "before"
    assert info["tpot_p50_us"] == pytest.approx(1001)
    assert info["tpot_p99_us"] == pytest.approx(1002)
    assert info["device"] == "cpu"
    assert info["versions"]["python"] == sys.version.split()[0]


@pytest.mark.slow
def test_saved_benchmarks_can_be_compared(timed_project: Project) -> None:
    storage = f"--benchmark-storage={timed_project.path / 'saved'}"
    run_against(timed_project, storage, "--benchmark-save=one").assert_outcomes(passed=1)
    timed_project.write(engine=engine(1005))
    result = run_against(timed_project, storage, "--benchmark-compare")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode (0001_one)*"])


def test_steps_are_timed_with_benchmarks_disabled(timed_project: Project) -> None:
    write_reference(timed_project, 950)
    run_against(timed_project, "--benchmark-disable").assert_outcomes(failed=1)
