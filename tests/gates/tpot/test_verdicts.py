"""Verdicts of ``roseinfer_tpot`` in a user's project, on steps that advance a clock."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import engine, run_against, speed_test, write_reference

if TYPE_CHECKING:
    from tests.project import Project


def test_step_is_skipped_without_a_reference(timed_project: Project) -> None:
    result = timed_project.pytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED * nothing to compare with: add --roseinfer-against REF, *"]
    )


def test_equal_step_has_the_verdict_same(timed_project: Project) -> None:
    result = run_against(timed_project)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*times of decode steps*", "there: before", "*test_decode* 1.000 *to* 20 * SAME"]
    )


def test_slower_step_fails_with_its_ratio(timed_project: Project) -> None:
    write_reference(timed_project, 950)
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*SLOWER than before: a step takes 1.053 times as long (1.05*"])


def test_slower_step_passes_when_reported_only(timed_project: Project) -> None:
    write_reference(timed_project, 950)
    result = run_against(timed_project, "--roseinfer-report-slower")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 1.053 * SLOWER"])


def test_faster_step_passes(timed_project: Project) -> None:
    write_reference(timed_project, 1100)
    result = run_against(timed_project)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 0.909 * FASTER"])


def test_marker_sets_the_margin(timed_project: Project) -> None:
    write_reference(timed_project, 950)
    timed_project.write(test_speed=speed_test("margin=0.06"))
    run_against(timed_project).assert_outcomes(passed=1)


@pytest.mark.slow
def test_step_within_its_noise_is_undecided_and_passes(timed_project: Project) -> None:
    """Every other process takes 4% longer, so that the margin lies within the interval."""
    count = """
    import itertools

    for number in itertools.count():
        try:
            open(f"{__file__}.{number}", "x").close()
            break
        except FileExistsError:  # another process has that number
            pass
    MICROSECONDS = 1000 + 40 * (number % 2)
    """
    text = dedent(count) + dedent(engine(0)).replace("MICROSECONDS = 0\n", "")
    timed_project.write(engine=text, test_speed=speed_test("series_per_process=1"))
    result = run_against(timed_project)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*: UNDECIDED after 60 series and * s; its margin is 2.0%"])


def test_progress_is_printed_to_a_pipe(timed_project: Project) -> None:
    """Without -s the line is printed during the comparison, before the test's own result."""
    frequent_progress = "from pytest_roseinfer.gates import paired_timing\npaired_timing._FIRST = 0"
    timed_project.write(conftest=frequent_progress, test_speed=speed_test("series_per_process=5"))
    write_reference(timed_project, 500)
    result = run_against(timed_project, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_speed.py::test_decode: 5 series, next analysis after 13: here / there 2.000 *",
            "*test_decode FAILED *",
        ]
    )
    assert result.stdout.str().count("next analysis after") == 1


def test_comparison_out_of_time_is_undecided(timed_project: Project) -> None:
    """A step twice as slow passes where the time was too short, and the run says so."""
    write_reference(timed_project, 500)
    timed_project.write(test_speed=speed_test("series_per_process=3, seconds=1000"))
    result = run_against(timed_project, "--roseinfer-tpot-seconds=0.001")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_decode* 2.000 *none* 3 * UNDECIDED",
            "*: UNDECIDED after 3 series and * s: too short for an interval, which needs "
            "13 series, about * s here",
        ]
    )


def test_different_number_of_tokens_fails(timed_project: Project) -> None:
    write_reference(timed_project, 1000, tokens=8)
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a step generates 4 tokens here and 8 there*"])


def test_noise_floor_is_reported_in_percent(timed_project: Project) -> None:
    result = timed_project.pytest("--roseinfer-noise-floor")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*against itself +0.00% +/- 0.00% after 60 series*a slowdown of 2.0% is found*"]
    )
