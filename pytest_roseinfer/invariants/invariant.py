"""What an invariant is, and the registry that knows every one.

A new invariant is one new file in this folder: a function under ``@invariant`` that judges an
observation of one step. Its name is how reports call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pytest_roseinfer.findings.finding import Finding as Finding
from pytest_roseinfer.findings.observation import Observation as Observation

Check = Callable[[Observation], Finding | None]
OPERATION, ATTENTION, BAD_CALL = "operation", "attention", "bad call"
"""What an observation can be made after."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """A check, and when it is due."""

    name: str
    check: Check
    rank: int
    """The lowest rank is judged first: what it finds explains most."""
    needs: frozenset[str]
    """What an adapter must offer for it; "windows" where layers have some."""
    after: frozenset[str]


INVARIANTS: list[Invariant] = []


def invariant(
    *, rank: int, needs: Iterable[str] = (), after: Iterable[str] = (OPERATION,)
) -> Callable[[Check], Check]:
    """Register a function as an invariant, under its own name."""

    def register(check: Check) -> Check:
        own = Invariant(check.__name__, check, rank, frozenset(needs), frozenset(after))
        INVARIANTS.append(own)
        INVARIANTS.sort(key=lambda each: each.rank)
        return check

    return register
