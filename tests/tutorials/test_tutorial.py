"""docs/tutorial.md is true: its code runs, in the time it says, and fails as it shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

import pytest_roseinfer
from tests.tutorials.planted_bugs import PLANTED
from tests.tutorials.printed import anywhere, blocks, list_cache, page, with_any_numbers

if TYPE_CHECKING:
    from tests.project import Project

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = page("tutorial.md")
MOST_SECONDS = 10.0
"""Of one CPU, for the first green run, without importing torch; it takes 2.5."""

TELL_THE_TIME = """
    import time

    def pytest_unconfigure():
        print("CPU seconds:", time.process_time())
"""


@pytest.fixture
def of_list_cache(project: Project) -> Project:
    project.write(test_my_cache=list_cache(), conftest=TELL_THE_TIME)
    return project


def test_the_line_that_installs_is_the_one_of_the_readme() -> None:
    (line,) = blocks(TUTORIAL, "Install", "sh")
    here = line.strip().replace("./roseinfer", ".").replace("roseinfer/", "")
    assert here in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_run_is_green_and_quick(of_list_cache: Project) -> None:
    result = of_list_cache.pytest("-W", "error")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3, skipped=2)
    result.stdout.fnmatch_lines(
        [
            # With no option given, only the tests show that there is something to say.
            "collected 5 items",
            "roseinfer: target test_my_cache:ListCache",
            "roseinfer: device cpu *",
            *with_any_numbers(*blocks(TUTORIAL, "Ten lines")),
            "not offered: table, ledger, gather, fork, free, prefill, *append_many, *path_counts*",
        ]
    )
    (seconds,) = re.findall(r"CPU seconds: (.*)", result.stdout.str())
    assert float(seconds) < MOST_SECONDS


def test_the_failure_reads_as_it_is_shown(of_list_cache: Project) -> None:
    of_list_cache.write(test_my_cache=list_cache().replace("key[:, i]", "key[:, 0]"))
    result = of_list_cache.pytest("-k", "histories")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (shown,) = blocks(TUTORIAL, "Break it")
    assert anywhere(shown) in anywhere(result.stdout.str())


def test_the_docstring_of_the_package_has_the_same_code() -> None:
    indented = str(pytest_roseinfer.__doc__).partition("::\n")[2].partition("\nRun ``pytest``")[0]
    assert ast.dump(ast.parse(dedent(indented))) == ast.dump(ast.parse(list_cache()))


def test_ten_lines_are_ten() -> None:
    code = [line for line in list_cache().splitlines() if line.strip() and "import" not in line]
    assert len(code) <= 12  # with the class and the line that makes tests of it


def test_the_tutorial_counts_its_bugs() -> None:
    assert f" lists {len(PLANTED)} such bugs" in " ".join(TUTORIAL.split())
