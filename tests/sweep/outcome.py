"""Outcomes of subjects: the engine agrees, refuses by name, or is wrong, which is a bug."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    AGREES = "agrees"
    REFUSED = "refused"
    WRONG = "WRONG"
    """Other tokens, an exception that is not roseinfer's, a crash, or a timeout."""
    NOT_BUILT = "not built"
    """No tiny model could be built, so nothing was checked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    why: str = ""
    difference: float = 0.0
    """Largest difference of a log-probability from the reference's, if the engine agrees."""

    def __str__(self) -> str:
        if self.kind is Kind.AGREES:
            return f"agrees to {self.difference:.0e}" + (f"; {self.why}" if self.why else "")
        return f"{self.kind}: {self.why}"
