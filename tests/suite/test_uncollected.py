"""A class of ``conformance()`` under a name that pytest passes over is hinted at."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.project import Project

HINT = "* PytestCollectionWarning: {}: class of conformance() is not run; pytest collects *"


def run(project: Project, classes: str, *options: str) -> pytest.RunResult:
    """Run a module with these classes of ``conformance()``."""
    project.copy_caches()
    begin = "from caches.list_cache import ListCache\nfrom pytest_roseinfer import conformance\n"
    project.write(test_mine=begin + dedent(classes))
    return project.pytest("-p", "no:cacheprovider", *options)


def test_one_that_is_not_run_is_hinted_at(project: Project) -> None:
    result = run(project, "Conf = conformance(ListCache)")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines([HINT.format("Conf") + "begin with Test"])


def test_an_adapter_without_tests_is_hinted_at(project: Project) -> None:
    classes = """
        class Mine(ListCache):
            pass
        class _Base(ListCache):
            pass
    """
    result = run(project, classes)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    hint = "* PytestCollectionWarning: Mine: adapter without tests in this module; write TestMine"
    result.stdout.fnmatch_lines([f"{hint} = conformance(Mine)"])
    assert result.stdout.str().count(": adapter without tests") == 1


def test_an_adapter_whose_name_pytest_collects_is_hinted_at(project: Project) -> None:
    result = run(project, "class TestMine(ListCache):\n    pass")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    hint = "* PytestCollectionWarning: TestMine: adapter without tests in this module; name it Mine"
    result.stdout.fnmatch_lines([f"{hint}, and write TestMine = conformance(Mine)"])


def test_an_adapter_beside_tests_is_not(project: Project) -> None:
    """They may run histories on it."""
    classes = """
        class Mine(ListCache):
            pass
        def test_it():
            assert Mine
    """
    assert ": adapter without tests" not in run(project, classes).stdout.str()


def test_one_that_is_run_otherwise_is_not(project: Project) -> None:
    classes = """
        from pytest_roseinfer.suite.conformance import ConformanceTests
        from pytest_roseinfer.suite.shipped_tests import ShippedTests

        Base = conformance(ListCache)
        class TestMine(Base):
            pass
        Alias = TestOther = conformance(ListCache)
        _kept = conformance(ListCache)
    """
    result = run(project, classes, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["*::TestMine::*"])
    assert "PytestCollectionWarning" not in result.stdout.str()


def test_the_prefixes_of_the_project_are_named(project: Project) -> None:
    classes = "TestConf = conformance(ListCache)\nCheckConf = conformance(ListCache)"
    result = run(project, classes, "--collect-only", "-o", "python_classes=Check Suite")
    result.stdout.fnmatch_lines([HINT.format("TestConf") + "begin with Check or Suite"])
    assert "CheckConf is a class" not in result.stdout.str()


def test_where_warnings_are_errors_the_module_fails(project: Project) -> None:
    result = run(project, "Conf = conformance(ListCache)", "-W", "error", "--collect-only")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting test_mine.py*", "Conf: class of *"])
