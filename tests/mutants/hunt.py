"""Search one cache until something shows that it is wrong, as a user's run would.

The tests are those of ``conformance``, in their order and with the examples of the profile.
All that differs is that a search ends at the first example that fails: finding the bug is
measured here, not making the example small.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pytest_roseinfer import settings
from pytest_roseinfer.report.verdict import problems_of
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.interpreter import fast_interpreter
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.suite.conformance import conformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.settings import Settings
    from tests.mutants.tally import Tally

_HANGS_AFTER = 60
"""Seconds for one example, after which SIGALRM ends the process."""


@dataclass(frozen=True, slots=True)
class Found:
    """Which check failed, and what it said."""

    check: str
    what: str


class Stop(BaseException):
    """Leaves a search, which would go on to make the example smaller."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def hunt(targets: Sequence[type[Adapter]], asked: Settings, tally: Tally) -> Found | None:
    """Search every target as asked; None when all of them pass."""
    settings.set_current(asked)
    coverage.set_current(coverage.Coverage())
    counted = counting(Search[Any].check_once, tally)
    with fast_interpreter(), patch.object(Search, "check_once", counted):
        for target in targets:
            tests = conformance(target)()
            for name in tests.shipped():
                tally.check = name.removeprefix("test_")
                try:
                    _run(getattr(tests, name))
                except Stop as stopped:
                    return Found(tally.check, stopped.what)
    problems = problems_of(coverage.current(), require_paths=asked.require_paths)
    for lines in problems.values():
        return Found("coverage", lines[0])
    return None


def _run(test: Callable[[], None]) -> None:
    import pytest

    try:
        test()
    except pytest.skip.Exception:
        return


def counting(check_once: Callable[..., None], tally: Tally) -> Callable[..., None]:
    """Have a search count its examples, and stop at the first failure."""

    def counted(search: Search[Any], example: Any) -> None:
        with guarded(tally, example.size):
            check_once(search, example)

    return counted


@contextmanager
def guarded(tally: Tally, operations: int) -> Iterator[None]:
    """Count the example that runs inside, end it when it hangs, and stop where it fails."""
    tally.count(operations)
    signal.alarm(_HANGS_AFTER)
    try:
        yield
    except Exception as error:
        raise Stop(str(error).partition("\n")[0] or type(error).__name__) from error
    finally:
        signal.alarm(0)
