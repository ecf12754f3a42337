"""What the tests of other projects share."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.run import coverage

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def searching() -> Iterator[None]:
    """Search with a fixed seed, count apart, and let what is imported warn."""
    asked, seen = settings.current(), coverage.current()
    settings.set_current(settings.Settings(examples=500, steps=20, seed=1))
    coverage.set_current(coverage.Coverage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    settings.set_current(asked)
    coverage.set_current(seen)
