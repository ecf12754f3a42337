"""Kept failures: one option makes a failure a permanent test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.search.test_failures import fail

if TYPE_CHECKING:
    from tests.project import Project

FIXED = """
    from caches.broken_caches import SwapsRows
    from pytest_roseinfer import conformance

    {fix}
    TestIt = conformance(SwapsRows)
"""
ONE_EXAMPLE = ("--roseinfer-examples=1", "--roseinfer-required-paths=off", "-k", "histories")


def test_kept_failure_is_replayed_by_every_run(project: Project) -> None:
    result = fail(project, "SwapsRows", "-k", "histories", "--roseinfer-keep")
    (kept,) = (project.path / "roseinfer-kept").glob("*.json")
    result.stdout.fnmatch_lines([f"*kept as roseinfer-kept/{kept.name}: every run replays it*"])
    result = project.pytest("test_it.py", *ONE_EXAMPLE, "--roseinfer-seed=0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*It is a kept failure: roseinfer-kept/{kept.name} replays*"])


def test_kept_failure_passes_once_the_bug_is_fixed(project: Project) -> None:
    fail(project, "SwapsRows", "-k", "histories", "--roseinfer-keep")
    fix = "del SwapsRows.write"
    project.write(test_it=FIXED.format(fix=fix))
    result = project.pytest("test_it.py", *ONE_EXAMPLE)
    result.assert_outcomes(passed=1)


def test_failure_is_not_kept_without_the_option(project: Project) -> None:
    fail(project, "SwapsRows", "-k", "histories")
    assert not (project.path / "roseinfer-kept").exists()


@pytest.mark.slow
def test_kept_file_that_is_no_trace_fails_the_test(project: Project) -> None:
    fail(project, "SwapsRows", "-k", "histories", "--roseinfer-keep")
    (kept,) = (project.path / "roseinfer-kept").glob("*.json")
    trace = json.loads(kept.read_text())
    kept.write_text(json.dumps({**trace, "check": "none"}))
    result = project.pytest("test_it.py", *ONE_EXAMPLE)
    result.stdout.fnmatch_lines([f"*{kept.name} is not a trace of this version: unknown check*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
