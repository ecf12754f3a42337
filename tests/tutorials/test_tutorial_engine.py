"""docs/tutorial-engine.md is true: its engine is green, and fails as it shows once it is broken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.engines.test_engines import failures
from tests.tutorials.printed import anywhere, blocks, page

if TYPE_CHECKING:
    from tests.project import Project

TUTORIAL = page("tutorial-engine.md")
ENGINE = "\n\n\n".join(blocks(TUTORIAL, language="python"))
OTHERS = re.findall(r"^- `(.*)` for `(.*)`:\s+`(.*)`$", TUTORIAL, re.M)


def broken(becomes: str, find: str) -> str:
    """Return the tutorial's file with a bug in it."""
    assert ENGINE.count(find) == 1
    return ENGINE.replace(find, becomes)


def test_the_first_run_is_green(project: Project) -> None:
    project.write(test_my_engine=ENGINE)
    result = project.pytest("-W", "error")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=2)
    (shown,) = blocks(TUTORIAL, "The adapter")
    numbers = re.compile(r"(?<= in )\d+(?= s,)|(?<=seed )\d+|(?<= )\d+(?= +(equal|met))")
    result.stdout.fnmatch_lines([numbers.sub("*", line) for line in shown.splitlines()])


def test_the_failure_reads_as_it_is_shown(project: Project) -> None:
    becomes, find = re.findall(r"write\s`(.*?)` for `(.*?)`", TUTORIAL)[0]
    project.write(test_my_engine=broken(becomes, find))
    result = project.pytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (shown,) = blocks(TUTORIAL, "Break it")
    assert anywhere(shown) in anywhere(result.stdout.str())


@pytest.mark.parametrize(("becomes", "find", "said"), OTHERS)
def test_the_others_say_what_the_table_says(
    project: Project, becomes: str, find: str, said: str
) -> None:
    project.write(test_my_engine=broken(becomes, find))
    project.pytest("--junitxml=results.xml")
    assert failures(project)["MyEngine"] == said


def test_there_are_others() -> None:
    assert len(OTHERS) == 3
