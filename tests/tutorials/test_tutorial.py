"""docs/tutorials/cache.md: its code runs in the stated time, and fails as printed."""

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
TUTORIAL = page("tutorials/cache.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_SECONDS = 10.0
"""CPU seconds of the first green run without importing torch; it takes 2.5."""

PRINT_CPU_SECONDS = """
    import time

    def pytest_unconfigure():
        print("CPU seconds:", time.process_time())
"""


@pytest.fixture
def list_cache_project(project: Project) -> Project:
    project.write(test_my_cache=list_cache(), conftest=PRINT_CPU_SECONDS)
    return project


def test_install_command_equals_that_of_the_readme() -> None:
    (line,) = blocks(TUTORIAL, "Install", "sh")
    command = line.strip().replace("./roseinfer", ".").replace("roseinfer/", "")
    assert command in README


def test_first_run_passes_quickly(list_cache_project: Project) -> None:
    result = list_cache_project.pytest("-W", "error")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3, skipped=2)
    result.stdout.fnmatch_lines(
        [
            # Without options, the tests alone cause a header.
            "collected 5 items",
            "roseinfer: target test_my_cache:ListCache",
            "roseinfer: device cpu *",
            *with_any_numbers(*blocks(TUTORIAL, "Ten lines")),
        ]
    )
    (seconds,) = re.findall(r"CPU seconds: (.*)", result.stdout.str())
    assert float(seconds) < MAX_SECONDS


@pytest.mark.slow
def test_verbose_run_lists_methods_and_sizes(list_cache_project: Project) -> None:
    result = list_cache_project.pytest("-v", "-k", "histories", "-W", "error")
    result.stdout.fnmatch_lines(
        [
            "largest: 130 rows, *, 516 tokens",
            "tested: make *, append *, peek *",
            "not offered: table, ledger, gather, gather_first, fork, *append_many, *path_counts*",
            "checked: read_back *",
        ]
    )


def test_failure_equals_the_printed_one(list_cache_project: Project) -> None:
    list_cache_project.write(test_my_cache=list_cache().replace("key[:, i]", "key[:, 0]"))
    result = list_cache_project.pytest("-k", "histories")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (printed_failure,) = blocks(TUTORIAL, "Break it")
    assert anywhere(printed_failure) in anywhere(result.stdout.str())


def test_readme_has_the_code_and_the_failure_of_the_tutorial() -> None:
    assert blocks(README, "Test a cache of your own", "python") == [list_cache()]
    (printed,) = blocks(README, "Test a cache of your own")
    (failure,) = blocks(TUTORIAL, "Break it")
    assert len(printed.splitlines()) == 5
    assert printed in failure


def test_package_docstring_has_the_code_of_the_tutorial() -> None:
    indented = str(pytest_roseinfer.__doc__).partition("::\n")[2].partition("\nRun ``pytest``")[0]
    assert ast.dump(ast.parse(dedent(indented))) == ast.dump(ast.parse(list_cache()))


def test_ten_lines_of_the_tutorial_are_ten() -> None:
    code = [line for line in list_cache().splitlines() if line.strip() and "import" not in line]
    assert len(code) <= 12  # with the class statement and the line that makes its tests


def test_tutorial_has_the_number_of_planted_bugs() -> None:
    assert f" lists {len(PLANTED)} such bugs" in " ".join(TUTORIAL.split())
