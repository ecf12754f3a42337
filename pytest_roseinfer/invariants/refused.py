"""A step that is refused must leave the books as they were.

Where a cache admits row by row, and rows were admitted, or one gave back what left its windows
before it found no room, other invariants compare the books with what the oracle says of them.
"""

from __future__ import annotations

from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant
from pytest_roseinfer.oracle.windows import NEXT_TRY


@invariant(rank=3)
def refused(seen: Observation) -> Finding | None:
    if seen.outcome.fits or seen.outcome.written or seen.after.books() == seen.before.books():
        return None
    if seen.spec.windows and seen.declared.window_gives_back == NEXT_TRY:
        return None
    return Finding("a step that found no room changed the books")
