"""Times of steps are kept: in a folder of this plugin's own, and as benchmarks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.history import read_runs
from tests.gates.tpot.timed_project import against, benchmarks, engine, there

if TYPE_CHECKING:
    from tests.project import Project


def test_results_are_kept_with_a_plot_and_a_summary(
    timed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(timed.path / "summary.md"))
    for microseconds in (1000, 1100):
        there(timed, microseconds)
        against(timed, "--roseinfer-timings=kept").assert_outcomes(passed=1)
    runs = read_runs(timed.path / "kept")
    assert [run.times[0]["verdict"] for run in runs] == ["SAME", "FASTER"]
    assert [run.work for run in runs] == [[], []]
    assert {"python", "numpy", "cpu"} <= runs[0].environment.keys()
    side = runs[0].times[0]["here"]
    assert side["tokens_per_second"] == pytest.approx(4 / 1001e-6)
    assert side["share_of_memory_floor"] == pytest.approx(250 / 1001)
    assert side["path_counts"]["fast"] > 0
    assert (timed.path / "kept" / "timings.png").read_bytes().startswith(b"\x89PNG")
    summary = (timed.path / "summary.md").read_text()
    assert summary.count("### roseinfer: decode steps against before") == 2
    assert "FASTER" in summary


def test_the_work_of_steps_is_kept_too(timed: Project) -> None:
    """By workers as well, whose runs are one run."""
    timed.write(
        test_speed="""
            import pytest

            @pytest.mark.parametrize("size", [1, 2])
            def test_work(roseinfer_costs, size):
                roseinfer_costs.check("steady", lambda: sum(range(size)), tokens=size)
        """
    )
    timed.pytest("--roseinfer-timings=kept", "--roseinfer-update-costs", "-n2")
    timed.pytest("--roseinfer-timings=kept").assert_outcomes(passed=2)
    runs = read_runs(timed.path / "kept")
    for run in runs:
        assert sorted(work["tokens"] for work in run.work) == [1, 2]
        assert all(work["counts"]["python_calls"] == 2 for work in run.work)
        assert all(work["more"] == work["less"] == [] for work in run.work)
    assert len(runs) == 2


def test_a_run_that_keeps_nothing_fails(timed: Project) -> None:
    result = timed.pytest("--roseinfer-timings=kept")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: --roseinfer-timings: no test of this run timed or counted a step"]
    )


def test_both_sides_are_benchmarks(timed: Project) -> None:
    there(timed, 1100)
    before, here = benchmarks(timed)
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


def test_saved_benchmarks_can_be_compared(timed: Project) -> None:
    storage = f"--benchmark-storage={timed.path / 'saved'}"
    against(timed, storage, "--benchmark-save=one").assert_outcomes(passed=1)
    timed.write(engine=engine(1005))
    result = against(timed, storage, "--benchmark-compare")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode (0001_one)*"])


def test_benchmarks_that_are_off_are_timed_all_the_same(timed: Project) -> None:
    there(timed, 950)
    against(timed, "--benchmark-disable").assert_outcomes(failed=1)
