"""Which tests run where the command line names none of them, as in CI's run, which has little time.

Many alike run as one of four there, and some that take long not at all. ``pytest tests`` has all.
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
_EVERY_TEST = "EVERY_TEST"
MARKERS = (
    "many_alike: where no test is named, a fourth of the cases of this one run",
    "takes_long: where no test is named, this one does not run",
)


def note_whether_every_test(config: pytest.Config) -> None:
    """Remember it in a variable that the workers of pytest-xdist have too."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if named or config.option.keyword:
        os.environ[_EVERY_TEST] = "1"


def every_test() -> bool:
    return bool(os.environ.get(_EVERY_TEST))


def sampled(names: Iterable[str]) -> list[str]:
    """Return one of every few names, or all of them where all tests run."""
    return _part_of([*names], str)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those out that do not run where no test is named."""
    if every_test():
        return
    out = {item for item in items if item.get_closest_marker("takes_long")}
    alike: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("many_alike"):
            alike[item.nodeid.partition("[")[0]].append(item)
    for cases in alike.values():
        out |= {*cases} - {*_part_of(cases, lambda case: case.nodeid)}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def _part_of(all_of_them: list[_T], name: Callable[[_T], str]) -> list[_T]:
    """Choose by names, so that no value of a parameter is always the one that is chosen."""
    if every_test():
        return all_of_them
    most = -(-len(all_of_them) // _ONE_OF)
    chosen = sorted(all_of_them, key=lambda each: crc32(name(each).encode()))[:most]
    return [each for each in all_of_them if each in chosen]
