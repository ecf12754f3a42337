"""Context with settings and a coverage of its own, as in a run of pytest."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.run import coverage

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def fresh_run(used: settings.Settings) -> Iterator[None]:
    """Use these settings and an empty coverage within the context."""
    saved_settings, saved_coverage = settings.current(), coverage.current()
    settings.set_current(used)
    coverage.set_current(coverage.Coverage())
    try:
        yield
    finally:
        settings.set_current(saved_settings)
        coverage.set_current(saved_coverage)
