"""The fixture ``roseinfer_tpot`` as another project meets it, on steps that move a clock."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

from tests.gates.tpot.timed_project import against, engine, marked, there

if TYPE_CHECKING:
    from tests.project import Project


def test_nobody_asked_so_nothing_is_timed(timed: Project) -> None:
    result = timed.pytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED * nothing to compare with: add --roseinfer-against REF, *"]
    )


def test_the_same_step_is_the_same(timed: Project) -> None:
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*times of decode steps*", "there: before", "*test_decode* 1.000 *to* 20 * SAME"]
    )


def test_a_slower_step_fails_and_says_by_how_much(timed: Project) -> None:
    there(timed, 950)
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*SLOWER than before: a step takes 1.053 times as long (1.05*"])


def test_a_slower_step_can_be_reported_only(timed: Project) -> None:
    there(timed, 950)
    result = against(timed, "--roseinfer-report-slower")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 1.053 * SLOWER"])


def test_a_faster_step_passes(timed: Project) -> None:
    there(timed, 1100)
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 0.909 * FASTER"])


def test_the_margin_is_that_of_the_marker(timed: Project) -> None:
    there(timed, 950)
    timed.write(test_speed=marked("margin=0.06"))
    against(timed).assert_outcomes(passed=1)


def test_a_step_between_the_verdicts_is_undecided_and_passes(timed: Project) -> None:
    """Every other process finds 4% more, the others nothing: the margin lies in between."""
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
    timed.write(engine=text, test_speed=marked("series_per_process=1"))
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*: UNDECIDED after 60 series and * s; its margin is 2.0%"])


def test_a_comparison_says_how_far_it_is_to_a_pipe_too(timed: Project) -> None:
    """Without -s, and while it measures: the line comes before the test's own result."""
    hasty = "from pytest_roseinfer.gates import paired\npaired._FIRST = 0"
    timed.write(conftest=hasty, test_speed=marked("series_per_process=5"))
    there(timed, 500)
    result = against(timed, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_speed.py::test_decode: 5 series, next analysis after 13: here / there 2.000 *",
            "*test_decode FAILED *",
        ]
    )
    assert result.stdout.str().count("next analysis after") == 1


def test_time_that_is_up_decides_nothing(timed: Project) -> None:
    """A step twice as slow passes where there was no time to see it, and the run says so."""
    there(timed, 500)
    timed.write(test_speed=marked("series_per_process=3, seconds=1000"))
    result = against(timed, "--roseinfer-tpot-seconds=0.001")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_decode* 2.000 *none* 3 * UNDECIDED",
            "*: UNDECIDED after 3 series and * s: too short for an interval, which needs "
            "13 series, about * s here",
        ]
    )


def test_another_number_of_tokens_is_another_step(timed: Project) -> None:
    there(timed, 1000, tokens=8)
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a step generates 4 tokens here and 8 there*"])


def test_the_noise_floor_is_said_in_percent(timed: Project) -> None:
    result = timed.pytest("--roseinfer-noise-floor")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*against itself +0.00% +/- 0.00% after 60 series*a slowdown of 2.0% is found*"]
    )
