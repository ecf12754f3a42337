"""Search of one cache for a failure, as in a user's run.

The tests are those of ``conformance``, in their order and with the examples of the profile. Only,
a search ends at the first example that fails: the search is measured here, not the shrinking.
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
"""Seconds for one example; SIGALRM ends the process afterwards."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Check that failed, and its message."""

    check: str
    message: str


class Stop(BaseException):
    """Ends a search before it shrinks the example."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def hunt(
    targets: Sequence[type[Adapter]], search_settings: Settings, tally: Tally
) -> Failure | None:
    """Search every target with these settings; return None if all pass."""
    settings.set_current(search_settings)
    coverage.set_current(coverage.Coverage())
    counted = counting(Search[Any].check_once, tally)
    with fast_interpreter(), patch.object(Search, "check_once", counted):
        for target in targets:
            tests = conformance(target)()
            for name in tests.shipped():
                tally.check = name.removeprefix("test_")
                try:
                    _run(getattr(tests, name))
                except Stop as stop:
                    return Failure(tally.check, stop.message)
    problems = problems_of(coverage.current(), require_paths=search_settings.require_paths)
    for lines in problems.values():
        return Failure("coverage", lines[0])
    return None


def _run(test: Callable[[], None]) -> None:
    import pytest

    try:
        test()
    except pytest.skip.Exception:
        return


def counting(check_once: Callable[..., None], tally: Tally) -> Callable[..., None]:
    """Wrap a search's check to count its examples and to stop at the first failure."""

    def counted(search: Search[Any], example: Any) -> None:
        with guarded(tally, example.size):
            check_once(search, example)

    return counted


@contextmanager
def guarded(tally: Tally, operations: int) -> Iterator[None]:
    """Count the example of the context, end it if it hangs, and stop if it fails."""
    tally.count(operations)
    signal.alarm(_HANGS_AFTER)
    try:
        yield
    except Exception as error:
        raise Stop(str(error).partition("\n")[0] or type(error).__name__) from error
    finally:
        signal.alarm(0)
