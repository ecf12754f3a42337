"""No two sequences may be kept in one slot, or in one list."""

from __future__ import annotations

from pytest_roseinfer.findings.finding import Location
from pytest_roseinfer.invariants.invariant import Finding, Observation, invariant


@invariant(rank=2, needs=("kept_in",))
def kept_apart(seen: Observation) -> Finding | None:
    holders: dict[tuple[type, int], int] = {}
    for seq, kept in seen.after.kept.items():
        if isinstance(kept, Exception):
            what = f"kept_in({seq}) raised {type(kept).__name__}: {kept}"
            return Finding(what, Location(0, {seq: None}), kept)
        identity, shared = id(kept), "the same list"
        if isinstance(kept, int):
            identity, shared = kept, f"slot {kept}"
        other = holders.setdefault((type(kept), identity), seq)
        if other != seq:
            what = f"sequences {other} and {seq} are kept in {shared}"
            return Finding(what, Location(0, {other: None, seq: None}))
    return None
