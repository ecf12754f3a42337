"""A run that times nothing fails, and options and markers that make no sense are errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import against, marked

if TYPE_CHECKING:
    from tests.project import Project


def test_a_run_that_compared_nothing_fails(timed: Project) -> None:
    timed.write(test_speed="def test_other(): pass")
    for option in ("--roseinfer-against=before", "--roseinfer-noise-floor"):
        result = timed.pytest(option)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [f"FAILED: {option.partition('=')[0]}: no test of this run compared a step"]
        )


def test_a_test_that_takes_the_fixture_and_times_nothing_fails(timed: Project) -> None:
    timed.write(test_speed="def test_decode(roseinfer_tpot): pass")
    result = timed.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*took roseinfer_tpot and timed no step with it*"])


def test_workers_of_xdist_do_not_time_and_say_why(timed: Project) -> None:
    result = against(timed, "-n2", "-rs")
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


@pytest.mark.parametrize("mark", MISTAKES)
def test_an_argument_the_marker_does_not_have_is_a_usage_error(timed: Project, mark: str) -> None:
    timed.write(test_speed=marked(mark))
    result = timed.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_speed.py::test_decode: *{MISTAKES[mark]}"])


def test_a_marker_without_its_fixture_is_a_usage_error(timed: Project) -> None:
    timed.write(
        test_speed="""
            import pytest

            @pytest.mark.roseinfer_tpot(margin=0.1)
            def test_decode(): pass
        """
    )
    result = timed.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*does not take the fixture of this name*"])


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
def test_options_that_make_no_sense_are_usage_errors(
    timed: Project, arguments: tuple[str, ...]
) -> None:
    result = timed.pytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --roseinfer-*"])
