"""How far a median can be trusted, and what that says about the ratio of two times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESAMPLES = 20_000
"""Enough for dozens to lie in the narrowest tail that is asked about."""
_SEED = 20_011
"""The same values always give the same interval, so a verdict can be computed again."""


class Verdict(StrEnum):
    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Interval:
    """The bounds of the ratio: time here over time there."""

    low: float
    high: float

    def __str__(self) -> str:
        return "none" if self == UNBOUNDED else f"{self.low:.3f} to {self.high:.3f}"


UNBOUNDED = Interval(0.0, math.inf)
"""What too few values say."""


def verdict_of(interval: Interval, margin: float) -> Verdict:
    """Return what holds for the whole interval; a margin of 0.02 tolerates 2% more time."""
    if interval.low > 1 + margin:
        return Verdict.SLOWER
    if interval.high < 1 / (1 + margin):
        return Verdict.FASTER
    if interval.low >= 1 / (1 + margin) and interval.high <= 1 + margin:
        return Verdict.SAME
    return Verdict.UNDECIDED


def median_interval(values: Sequence[float], error: float) -> Interval:
    """Bound the median; on either side that is wrong with a probability of at most ``error``.

    The bounds are those of the percentile bootstrap, widened where needed to the interval
    between two sorted values that holds for noise of any shape: with few values the bootstrap
    alone promises too much.
    """
    if not (rank := _outermost(len(values), error)):
        return UNBOUNDED
    import numpy as np

    random = np.random.default_rng(_SEED)
    chosen = random.integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[chosen], axis=1)
    low, high = np.quantile(medians, [error, 1 - error])
    ordered = sorted(values)
    return Interval(min(float(low), ordered[rank - 1]), max(float(high), ordered[-rank]))


def _outermost(count: int, error: float) -> int:
    """Return the largest rank whose value exceeds the true median with at most this error."""
    rank, tail = 0, 1 / 2**count
    while tail <= error:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    return rank
