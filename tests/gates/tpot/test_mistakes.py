"""Runs that time nothing, and invalid options and markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import run_against, speed_test

if TYPE_CHECKING:
    from tests.project import Project


def test_run_that_compares_nothing_fails(timed_project: Project) -> None:
    timed_project.write(test_speed="def test_other(): pass")
    for option in ("--roseinfer-against=before", "--roseinfer-noise-floor"):
        result = timed_project.pytest(option)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [f"FAILED: {option.partition('=')[0]}: no test of this run compared a step"]
        )


def test_test_that_times_nothing_fails(timed_project: Project) -> None:
    timed_project.write(test_speed="def test_decode(roseinfer_tpot): pass")
    result = timed_project.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*took roseinfer_tpot and timed no step with it*"])


@pytest.mark.slow
def test_xdist_workers_do_not_time_and_give_the_reason(timed_project: Project) -> None:
    result = run_against(timed_project, "-n2", "-rs")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: --roseinfer-against: no test *; decode steps are not timed in pytest-xdist *"]
    )


MISTAKES = {
    "margin=2": "expected a number above 0 and below 1",
    "margin='2%'": "expected a number above 0 and below 1",
    "cpus=0.5": "expected a whole number from 1",
    "seconds=0": "expected a number above 0",
    "rounds=3": "does not take rounds, only margin, *",
    "0.02": "does not take 0.02, only margin, *",
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("marker_arguments", MISTAKES)
def test_invalid_argument_of_the_marker_is_a_usage_error(
    timed_project: Project, marker_arguments: str
) -> None:
    timed_project.write(test_speed=speed_test(marker_arguments))
    result = timed_project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: test_speed.py::test_decode: *{MISTAKES[marker_arguments]}"]
    )


def test_marker_without_its_fixture_is_a_usage_error(timed_project: Project) -> None:
    timed_project.write(
        test_speed="""
            import pytest

            @pytest.mark.roseinfer_tpot(margin=0.1)
            def test_decode(): pass
        """
    )
    result = timed_project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*does not take the fixture of this name*"])


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "arguments",
    [
        ("--roseinfer-against=before", "--roseinfer-noise-floor"),
        ("--roseinfer-update-tpot",),
        ("--roseinfer-report-slower",),
        ("--roseinfer-tpot-seconds=5",),
        ("--roseinfer-tpot-seconds=0", "--roseinfer-against=before"),
    ],
)
def test_invalid_combinations_of_options_are_usage_errors(
    timed_project: Project, arguments: tuple[str, ...]
) -> None:
    result = timed_project.pytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --roseinfer-*"])
