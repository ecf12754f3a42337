"""Markers: their registration, their effects and their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.project import Project

MARKED = """
    import pytest

    @pytest.mark.{mark}
    def test_marked():
        from pytest_roseinfer import settings
        current = settings.current()
        print("SEEN", current.examples, current.steps)
"""


def run(project: Project, mark: str, *arguments: str) -> pytest.RunResult:
    project.write(test_marked=MARKED.format(mark=mark))
    return project.pytest("--strict-markers", "-rs", "-s", *arguments)


def test_markers_are_registered_and_listed(project: Project) -> None:
    result = project.pytest("--markers")
    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.roseinfer_gpu: needs a GPU; runs with --roseinfer-gpu",
            "@pytest.mark.roseinfer(examples=N, steps=N): *",
        ]
    )


def test_gpu_test_is_skipped_with_a_reason(project: Project) -> None:
    result = run(project, "roseinfer_gpu")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs a GPU: run with --roseinfer-gpu"])


def test_gpu_test_runs_with_the_option(project: Project) -> None:
    gpu = project.pretend_gpus(count=1)
    run(project, "roseinfer_gpu", *gpu).assert_outcomes(passed=1)


def test_marker_sets_examples_unless_the_command_line_does(project: Project) -> None:
    mark = "roseinfer(examples=7, steps=3)"
    run(project, mark).stdout.fnmatch_lines(["*SEEN 7 3"])
    run(project, mark, "--roseinfer-steps=4").stdout.fnmatch_lines(["*SEEN 7 4"])


def test_closest_marker_applies(project: Project) -> None:
    project.write(
        test_marked="""
            import pytest
            from pytest_roseinfer import settings

            pytestmark = pytest.mark.roseinfer(examples=7, steps=3)

            @pytest.mark.roseinfer(examples=8)
            def test_own():
                assert (settings.current().examples, settings.current().steps) == (8, 3)

            def test_other():
                assert (settings.current().examples, settings.current().steps) == (7, 3)
        """
    )
    project.pytest().assert_outcomes(passed=2)


MISTAKES = {
    "roseinfer_gpu(count=2)": "the marker roseinfer_gpu takes no arguments",
    "roseinfer_gpu('cuda:1')": "the marker roseinfer_gpu takes no arguments",
    "roseinfer(example=5)": "the marker roseinfer does not take example, only examples=N and *",
    "roseinfer(5)": "the marker roseinfer does not take 5, only examples=N and steps=N",
    "roseinfer(steps=0)": "the marker roseinfer has steps=0: expected a whole number from 1",
    "roseinfer(steps='9')": "the marker roseinfer has steps='9': expected a whole number from 1",
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("mark", MISTAKES)
def test_invalid_argument_of_a_marker_is_a_usage_error(project: Project, mark: str) -> None:
    result = run(project, mark)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_marked.py::test_marked: {MISTAKES[mark]}"])


@pytest.mark.slow
def test_invalid_argument_is_a_usage_error_with_gpus_and_workers(project: Project) -> None:
    for options in (project.pretend_gpus(count=1), ["-n", "2"]):
        result = run(project, "roseinfer_gpu(count=2)", *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "the marker roseinfer_gpu takes no arguments" in str(result.stderr)
