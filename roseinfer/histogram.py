"""A histogram as Prometheus has them: how many values were at most so large."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_BOUNDS = (1.0, *(float(8 << power) for power in range(12)))
"""Those of vLLM for the tokens of a step: 1, then 8, 16, 32 and so on up to 16384."""


@dataclass(slots=True)
class Histogram:
    """Counts values. The one of prometheus-client takes a lock for each of them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """How many values were in each range: the last of them has no bound."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, with how many values it is a bound of."""
        sums, so_far = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((str(bound), float(so_far)))
        return sums
