"""Warnings about classes of ``conformance()`` that pytest does not collect."""

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
    imports = "from caches.list_cache import ListCache\nfrom pytest_roseinfer import conformance\n"
    project.write(test_mine=imports + dedent(classes))
    return project.pytest("-p", "no:cacheprovider", *options)


def test_uncollected_class_is_warned_about(project: Project) -> None:
    result = run(project, "Conf = conformance(ListCache)")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines([HINT.format("Conf") + "begin with Test"])


def test_adapter_without_tests_is_warned_about(project: Project) -> None:
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


def test_adapter_named_like_a_test_is_warned_about(project: Project) -> None:
    result = run(project, "class TestMine(ListCache):\n    pass")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    hint = "* PytestCollectionWarning: TestMine: adapter without tests in this module; name it Mine"
    result.stdout.fnmatch_lines([f"{hint}, and write TestMine = conformance(Mine)"])


def test_adapter_in_a_module_with_tests_is_not_warned_about(project: Project) -> None:
    """Its tests may run histories on the adapter."""
    classes = """
        class Mine(ListCache):
            pass
        def test_it():
            assert Mine
    """
    assert ": adapter without tests" not in run(project, classes).stdout.str()


def test_base_class_of_collected_tests_is_not_warned_about(project: Project) -> None:
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


def test_warning_names_the_prefixes_of_the_project(project: Project) -> None:
    classes = "TestConf = conformance(ListCache)\nCheckConf = conformance(ListCache)"
    result = run(project, classes, "--collect-only", "-o", "python_classes=Check Suite")
    result.stdout.fnmatch_lines([HINT.format("TestConf") + "begin with Check or Suite"])
    assert "CheckConf is a class" not in result.stdout.str()


def test_warning_as_error_fails_the_module(project: Project) -> None:
    result = run(project, "Conf = conformance(ListCache)", "-W", "error", "--collect-only")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting test_mine.py*", "Conf: class of *"])
