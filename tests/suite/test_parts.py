"""Long tests in parts: they cover all examples and are spread evenly."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.plugin.shipped import interleave_long_tests
from pytest_roseinfer.settings import Part
from pytest_roseinfer.suite.conformance import ConformanceTests

if TYPE_CHECKING:
    from tests.project import Project

MANY_PATHS = """
    from collections import Counter

    from caches.paged_cache import PagedCache
    from pytest_roseinfer import FastPath, conformance

    class Many(PagedCache):
        paths = {**PagedCache.paths, "all_rows_again": FastPath(equals="row_by_row")}

        def path_counts(self):
            counts = super().path_counts()
            return Counter(counts) + Counter(all_rows_again=counts["all_rows"])

    TestMany = conformance(Many)
"""
SEARCH = ("-v", "-k", "histories", "--roseinfer-examples=40", "--roseinfer-seed=1")
IN_PARTS = """
    from pytest_roseinfer.plugin import shipped

    def pytest_generate_tests(metafunc):
        shipped.split_into_parts(metafunc)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=str)
def test_parts_of_a_test_cover_the_same_examples(
    project: Project, workers: tuple[str, ...]
) -> None:
    """Parts are made as on a GPU, and by workers."""
    project.copy_caches()
    project.write(test_cache=MANY_PATHS)
    single = project.pytest(*SEARCH)
    if not workers:
        project.write(conftest=IN_PARTS)
    parts = project.pytest(*SEARCH, *workers)
    parts.assert_outcomes(passed=2)
    for part in ("1of2", "2of2"):
        parts.stdout.fnmatch_lines(
            [
                f"*PASSED*::test_histories?{part}?*"
                if workers
                else f"*::test_histories?{part}? PASSED*"
            ]
        )
    coverage_line = re.compile(r"(path|condition) .* (equal|met)$|checked:")
    lines = [[*filter(coverage_line.match, result.outlines)] for result in (single, parts)]
    assert lines[0] == lines[1] != []


def _item(name: str, of: int = 1, cls: type | None = ConformanceTests) -> Any:
    call = SimpleNamespace(params={"roseinfer_part": Part(1, of)})
    return SimpleNamespace(name=name, cls=cls, callspec=call)


def test_long_and_short_tests_are_interleaved() -> None:
    items = [
        *(_item("own", cls=None), _item("long 1", of=3), _item("long 2", of=3)),
        *(_item("short 1"), _item("own too", cls=None), _item("long 3", of=3), _item("short 2")),
    ]
    interleave_long_tests(items)
    assert [item.name for item in items] == [
        *("own", "long 1", "short 1", "long 2", "own too", "short 2", "long 3")
    ]
