"""Settings and coverage of a test's own, as a run of pytest has them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.run import coverage

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def fresh_run(asked: settings.Settings) -> Iterator[None]:
    """Have these settings and nothing covered inside; all is as before behind it."""
    before, seen = settings.current(), coverage.current()
    settings.set_current(asked)
    coverage.set_current(coverage.Coverage())
    try:
        yield
    finally:
        settings.set_current(before)
        coverage.set_current(seen)
