"""A bad call must raise what its adapter says, and change nothing. Histories hold none of them."""

from __future__ import annotations

from pytest_roseinfer.findings.finding import find_change
from pytest_roseinfer.invariants.invariant import BAD_CALL, Finding, Observation, invariant


@invariant(rank=1, after=(BAD_CALL,))
def bad_calls(seen: Observation) -> Finding | None:
    bad, error = seen.bad_call, seen.raised
    if bad is None:
        return None
    if error is not None and not isinstance(error, bad.errors):
        return Finding(f"{bad.words} raised {type(error).__name__}: {error}", cause=error)
    if error is None and bad.errors:
        names = " or ".join(kind.__name__ for kind in bad.errors)
        return Finding(f"{bad.words} went through; it must raise {names}")
    if seen.after.books() != seen.before.books():
        return Finding(f"{bad.words} changed the books")
    if change := find_change(seen, seen.before.arena, seen.after.arena):
        location, contents = change
        return Finding(f"{bad.words} changed what is stored in {contents.kind}", location)
    return None
