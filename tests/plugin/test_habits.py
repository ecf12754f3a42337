"""Habits of pytest users: selection, reruns, random order, plugins that are off, other folders."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.tutorials.printed import list_cache

if TYPE_CHECKING:
    from tests.project import Project

SHORT_SEARCH = ("--roseinfer-examples=12", "--roseinfer-seed=1", "-W", "error")
FLAKY = """
    import pathlib
    from caches.paged_cache import PagedCache
    from pytest_roseinfer import conformance

    class Flaky(PagedCache):
        def append(self, seqs, key, value):
            runs = pathlib.Path("runs")
            if not runs.exists():
                raise OSError("the first run fails")
            super().append(seqs, key, value)

    class TestFlaky(conformance(Flaky)):
        def teardown_method(self):
            pathlib.Path("runs").touch()
"""

# Large histories end after some seconds, and so at other steps in each run on a busy machine.
UNHURRIED = """
    from pytest_roseinfer.suite.large_search import LargeHistories

    LargeHistories.seconds = 600.0
"""


@pytest.fixture
def list_cache_project(project: Project) -> Project:
    project.write(test_my_cache=list_cache())
    return project


@pytest.fixture
def broken_project(project: Project) -> Project:
    project.write(test_my_cache=list_cache().replace("key[:, i]", "key[:, 0]"))
    return project


def require(module: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed; CI installs it into a folder of its own")


def test_random_order_changes_no_search(list_cache_project: Project) -> None:
    """pytest-randomly also seeds all random generators before each test."""
    require("pytest_randomly")
    list_cache_project.write(conftest=UNHURRIED)
    tested = set()
    for seed in (1, 2):
        result = list_cache_project.pytest(*SHORT_SEARCH, "-v", f"--randomly-seed={seed}")
        result.assert_outcomes(passed=3, skipped=2)
        tested.add(next(line for line in result.outlines if line.startswith("tested: ")))
    assert len(tested) == 1


def test_rerun_that_passes_is_judged(project: Project) -> None:
    """A failure that pytest-rerunfailures repeats must not hide unreached paths."""
    require("pytest_rerunfailures")
    project.copy_caches()
    project.write(test_mine=FLAKY)
    result = project.pytest(*SHORT_SEARCH, "-k", "histories", "--reruns=1", "-v")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*1 passed, 4 deselected, 1 rerun*"])
    assert "see failures" not in result.stdout.str()


def test_repeated_failure_is_reported_once(broken_project: Project) -> None:
    require("pytest_rerunfailures")
    result = broken_project.pytest(*SHORT_SEARCH, "-k", "histories", "--reruns=2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*1 failed, 4 deselected, 2 rerun*"])
    assert result.stdout.str().count("after step 1 of") == 1


@pytest.mark.slow
def test_last_failed_and_one_test_id(broken_project: Project) -> None:
    def run(*arguments: str) -> pytest.RunResult:
        return broken_project.pytester.runpytest_subprocess(*SHORT_SEARCH, *arguments)

    failed = run().parseoutcomes()["failed"]
    run("--lf").assert_outcomes(failed=failed, deselected=5 - failed)
    run("--lf", "--maxfail=1").assert_outcomes(failed=1, deselected=5 - failed)
    one_id = f"{broken_project.path}/test_my_cache.py::TestListCache::test_histories"
    run(one_id).assert_outcomes(failed=1)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["terminal", "skipping", "xdist", "hypothesispytest"])
def test_other_plugins_may_be_off(list_cache_project: Project, plugin: str) -> None:
    arguments = [*SHORT_SEARCH, "-p", f"no:{plugin}", "-k", "histories or fork"]
    if plugin == "skipping":  # pytest-benchmark uses its marks
        arguments += ["-p", "no:benchmark"]
    assert list_cache_project.pytest(*arguments).ret == pytest.ExitCode.OK


def test_failure_is_shown_without_a_terminal(broken_project: Project) -> None:
    arguments = ["-p", "no:terminal", "--junitxml=junit.xml", "-k", "histories"]
    result = broken_project.pytest(*SHORT_SEARCH, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "after step 1 of" in (broken_project.path / "junit.xml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["above", "below"])
def test_replay_command_works_in_the_folder_of_the_run(
    broken_project: Project, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """IDEs start pytest in other folders than the project's root."""
    root = broken_project.path
    (root / "below it").mkdir()
    start = root.parent if folder == "above" else root / "below it"
    monkeypatch.chdir(start)
    arguments = [*SHORT_SEARCH, f"--rootdir={root}", f"{root}/test_my_cache.py", "-k", "histories"]
    result = broken_project.pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1, deselected=4)
    (line,) = [line for line in result.outlines if line.startswith("replay with: pytest ")]
    assert os.listdir(root / ".roseinfer")
    replayed = broken_project.pytester.runpytest_subprocess(*shlex.split(line)[3:])
    assert replayed.ret == pytest.ExitCode.TESTS_FAILED
    replayed.stdout.fnmatch_lines(["FAILED: peek: sequence 1, layer 0, K: *"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=str)
def test_quiet_green_run_has_few_lines(list_cache_project: Project, workers: list[str]) -> None:
    result = list_cache_project.pytest(*SHORT_SEARCH, "-q", *workers)
    result.assert_outcomes(passed=3, skipped=2)
    assert len(result.outlines) <= 8
    result.stdout.fnmatch_lines(
        [
            "=* roseinfer: test_my_cache:ListCache =*",
            "12 histories of up to 12 steps on *, seed 1",
            "tested 3 of 69 methods, 2 invariants; -v lists them",
        ]
    )


UNREACHED = """
    from caches.paged_cache import PagedCache
    from pytest_roseinfer import FastPath, conformance

    class Unreached(PagedCache):
        paths = {**PagedCache.paths, "never": FastPath(equals="row_by_row")}

    TestUnreached = conformance(Unreached)
"""


@pytest.mark.slow
@pytest.mark.parametrize("required", ["on", "off"])
def test_weak_run_says_so_quietly(project: Project, required: str) -> None:
    project.copy_caches()
    project.write(test_mine=UNREACHED)
    paths = f"--roseinfer-required-paths={required}"
    result = project.pytest(*SHORT_SEARCH, "-q", "-k", "histories", paths)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "tested * methods, * invariants, 1 of 2 paths equal (not never), 1 of 1 condition *",
            *["WARNING: path 'never' was not reached by *"] * (required == "on"),
        ]
    )


def test_collected_tests_have_no_summary(list_cache_project: Project) -> None:
    result = list_cache_project.pytest("--collect-only", "-q", "-W", "error")
    assert result.ret == pytest.ExitCode.OK
    assert "= roseinfer: " not in result.stdout.str()
    result.stdout.fnmatch_lines(["test_my_cache.py::TestListCache::test_histories"])
