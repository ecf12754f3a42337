"""Selection of tests for runs that name none, such as CI's, which has little time.

A quarter of many similar cases runs, and long tests do not run. ``pytest tests`` runs all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_T = TypeVar("_T")
_ONE_OF = 4
_ALL_TESTS = "EVERY_TEST"
MARKERS = (
    "sampled_cases: runs a quarter of its cases if the command line names no test",
    "takes_long: does not run if the command line names no test",
)


def record_selection(config: pytest.Config) -> None:
    """Record whether all tests run, in a variable that workers of pytest-xdist inherit."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if named or config.option.keyword:
        os.environ[_ALL_TESTS] = "1"


def all_tests_selected() -> bool:
    return bool(os.environ.get(_ALL_TESTS))


def sample_names(names: Iterable[str]) -> list[str]:
    """Return a quarter of the names, or all if all tests run."""
    return _sample([*names], str)


def deselect_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not run if the command line names none."""
    if all_tests_selected():
        return
    deselected = {item for item in items if item.get_closest_marker("takes_long")}
    cases_by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled_cases"):
            cases_by_test[item.nodeid.partition("[")[0]].append(item)
    for cases in cases_by_test.values():
        deselected |= {*cases} - {*_sample(cases, lambda case: case.nodeid)}
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = [item for item in items if item not in deselected]


def _sample(items: list[_T], name: Callable[[_T], str]) -> list[_T]:
    """Choose by hashes of names, so that no value of a parameter is always chosen."""
    if all_tests_selected():
        return items
    most = -(-len(items) // _ONE_OF)
    chosen = sorted(items, key=lambda each: crc32(name(each).encode()))[:most]
    return [each for each in items if each in chosen]
