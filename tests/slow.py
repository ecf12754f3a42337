"""The marker ``slow``, for tests that the README's test command leaves out by ``-m "not slow"``.

Some tests have many similar cases: 15 of 16 are marked here. Some draw examples: they draw few in
one case, and many in another, which is slow. A workflow runs all of them in shards.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

_T = TypeVar("_T")
_ONE_OF = 16
MARKERS = (
    "slow: takes many seconds, or is one of many similar cases",
    "sampled_cases: 15 of 16 cases are marked slow",
)


def few_or_many_examples(few: int, many: int) -> pytest.MarkDecorator:
    """Run a test with its argument ``examples``: a few, and many in a slow case."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark all but one of 16 similar cases as slow, those aside that are slow by themselves."""
    cases_by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled_cases") and not item.get_closest_marker("slow"):
            cases_by_test[item.nodeid.partition("[")[0]].append(item)
    for cases in cases_by_test.values():
        for item in sorted_by_hash(cases, lambda case: case.nodeid)[-(-len(cases) // _ONE_OF) :]:
            item.add_marker("slow")


def sorted_by_hash(items: Iterable[_T], name: Callable[[_T], str]) -> list[_T]:
    """Sort by hashes of names, so that no value of a parameter always comes first."""
    return sorted(items, key=lambda each: crc32(name(each).encode()))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several parts of the tests, chosen by hashes of their names."""

    index: int
    """Number of the part, from 1."""
    count: int
    """Number of parts."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "2/4"; raise ArgumentTypeError for a text that is no shard."""
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if match is None or int(match[1]) > int(match[2]):
            raise ArgumentTypeError(f"{text!r} is no shard; write I/N with I from 1 to N")
        return cls(int(match[1]), int(match[2]))

    def split(self, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the tests of this shard, and the others."""
        own = [item for item in items if self._has(item.nodeid)]
        return own, [item for item in items if not self._has(item.nodeid)]

    def _has(self, nodeid: str) -> bool:
        return crc32(nodeid.encode()) % self.count == self.index - 1
