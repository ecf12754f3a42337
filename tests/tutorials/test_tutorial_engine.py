"""docs/tutorials/engine.md: its engine passes, and fails as printed once it is broken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.engines.test_engines import failures
from tests.tutorials.printed import anywhere, blocks, page, tutorial_engine

if TYPE_CHECKING:
    from tests.project import Project

TUTORIAL = page("tutorials/engine.md")
ENGINE = tutorial_engine()
OTHER_BUGS = re.findall(r"^- `(.*)` for `(.*)`:\s+`(.*)`$", TUTORIAL, re.M)


def with_bug(replacement: str, find: str) -> str:
    """Return the tutorial's file with a bug."""
    assert ENGINE.count(find) == 1
    return ENGINE.replace(find, replacement)


@pytest.mark.slow
def test_first_run_of_the_engine_passes(project: Project) -> None:
    project.write(test_my_engine=ENGINE)
    result = project.pytest("-v", "-W", "error")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=2)
    (printed,) = blocks(TUTORIAL, "The adapter")
    numbers = re.compile(r"(?<= in )\d+(?= s,)|(?<=seed )\d+|(?<= )\d+(?= +(equal|met))")
    result.stdout.fnmatch_lines([numbers.sub("*", line) for line in printed.splitlines()])


def test_engine_failure_equals_the_printed_one(project: Project) -> None:
    replacement, find = re.findall(r"write\s`(.*?)` for `(.*?)`", TUTORIAL)[0]
    project.write(test_my_engine=with_bug(replacement, find))
    result = project.pytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (printed,) = blocks(TUTORIAL, "Break it")
    assert anywhere(printed) in anywhere(result.stdout.str())


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("replacement", "find", "message"), OTHER_BUGS)
def test_other_bugs_fail_as_the_table_says(
    project: Project, replacement: str, find: str, message: str
) -> None:
    project.write(test_my_engine=with_bug(replacement, find))
    project.pytest("--junitxml=results.xml")
    assert failures(project)["MyEngine"] == message


def test_table_has_three_other_bugs() -> None:
    assert len(OTHER_BUGS) == 3
