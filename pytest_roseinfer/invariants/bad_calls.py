"""Calls that a cache must refuse, or that must leave no trace: histories hold none of them.

An adapter that overrides ``bad_calls`` makes up such calls for the state its cache is in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import Finding, find_change
from pytest_roseinfer.invariants.invariant import BAD_CALL, invariant

if TYPE_CHECKING:
    from pytest_roseinfer.running.observation import Observation


@invariant(rank=1, needs=("bad_calls",), after=(BAD_CALL,))
def bad_calls(seen: Observation) -> Finding | None:
    """A bad call raised what it must, and changed nothing."""
    if seen.called is None:
        return None
    bad, error = seen.called.call, seen.called.raised
    if error is not None and not isinstance(error, bad.errors):
        return Finding(f"{bad.words} raised {type(error).__name__}: {error}", cause=error)
    if error is None and bad.errors:
        names = " or ".join(kind.__name__ for kind in bad.errors)
        return Finding(f"{bad.words} went through; it must raise {names}")
    if seen.after.books() != seen.before.books():
        return Finding(f"{bad.words} changed the books")
    if change := find_change(seen, seen.before.arena, seen.after.arena):
        location, contents = change
        what = f"a call that was to be refused changed what is stored in {contents.kind}"
        return Finding(what, location)
    return None
