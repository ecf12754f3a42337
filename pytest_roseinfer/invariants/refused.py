"""A step that is refused must leave no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.invariants.invariant import invariant

if TYPE_CHECKING:
    from pytest_roseinfer.running.observation import Observation


@invariant(rank=3)
def refused(seen: Observation) -> Finding | None:
    """A step that found no room left the books as they were."""
    if seen.outcome.fits or seen.after.books() == seen.before.books():
        return None
    return Finding("a step that found no room changed the books")
