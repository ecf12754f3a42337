"""The marker ``slow``, for tests that the README's test command leaves out by ``-m "not slow"``.

Some tests have many similar cases: seven of eight are marked here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

_T = TypeVar("_T")
_ONE_OF = 8
MARKERS = (
    "slow: takes many seconds, or is one of many similar cases",
    "sampled_cases: seven of eight cases are marked slow",
)


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark all but one of eight similar cases as slow."""
    cases_by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled_cases"):
            cases_by_test[item.nodeid.partition("[")[0]].append(item)
    for cases in cases_by_test.values():
        for item in sorted_by_hash(cases, lambda case: case.nodeid)[-(-len(cases) // _ONE_OF) :]:
            item.add_marker("slow")


def sorted_by_hash(items: Iterable[_T], name: Callable[[_T], str]) -> list[_T]:
    """Sort by hashes of names, so that no value of a parameter always comes first."""
    return sorted(items, key=lambda each: crc32(name(each).encode()))
