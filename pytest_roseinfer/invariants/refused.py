"""A step that is refused must leave the books as they were."""

from __future__ import annotations

from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant


@invariant(rank=3)
def refused(seen: Observation) -> Finding | None:
    if seen.outcome.fits or seen.after.books() == seen.before.books():
        return None
    return Finding("a step that found no room changed the books")
