"""What an interval of the ratio of two times per token says about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNSURE = "UNSURE"


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the time here over the time there."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


def verdict_of(interval: Interval, margin: float) -> Verdict:
    """Only what holds for the whole interval is said; ``margin`` 0.02 tolerates 2% more time."""
    if interval.low > 1 + margin:
        return Verdict.SLOWER
    if interval.high < 1 / (1 + margin):
        return Verdict.FASTER
    if interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin:
        return Verdict.SAME
    return Verdict.UNSURE
