"""A Prometheus histogram: the number of values up to each bound."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_TOKEN_BOUNDS = (1.0, *(float(8 << power) for power in range(12)))
"""Bounds of tokens per step, equal to vLLM's: 1, then 8, 16, 32 and so on up to 16384."""


@dataclass(slots=True)
class Histogram:
    """A histogram without locks. The one of prometheus-client takes a lock for each value."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """Number of values in each range; the last range has no upper bound."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, with the number of values up to it."""
        sums, so_far = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((str(bound), float(so_far)))
        return sums
