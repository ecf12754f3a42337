"""What came of a subject: the engine agrees, refuses by name, or is wrong, which is a bug."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    AGREES = "agrees"
    REFUSED = "refused"
    WRONG = "WRONG"
    """Other tokens, another exception than ours, a crash, or no end."""
    NOT_BUILT = "not built"
    """No tiny model could be made, so nothing is known."""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    why: str = ""
    apart: float = 0.0
    """How far a log-probability was from the reference's, at most, where the engine agrees."""

    def __str__(self) -> str:
        if self.kind is Kind.AGREES:
            return f"agrees to {self.apart:.0e}" + (f"; {self.why}" if self.why else "")
        return f"{self.kind}: {self.why}"
