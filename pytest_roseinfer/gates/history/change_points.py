"""A change point is a run from which on a figure is another.

Counts are exact: any difference is a change. Times are not, and which of their moves are changes
the library ruptures finds: segments of the logarithms whose distributions differ, by a kernel that
an outlier of any size moves no further than a small one.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.history.circumstances import differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.gates.history.trends import Trend

_LEAST_RUNS = 3
"""So many times on either side of a change: fewer could be a busy day."""
_MISSING = (
    "change points of times need ruptures, which is not installed: pip install 'roseinfer[history]'"
)


@dataclass(frozen=True, slots=True)
class ChangePoint:
    trend: Trend
    at: int
    """The first point after the change."""
    before: float
    after: float
    """The median values on either side, up to the next change."""

    def __str__(self) -> str:
        earlier, later = (self.trend.points[at].run for at in (self.at - 1, self.at))
        by = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        lines = [
            f"{self.trend.title}: {self.before:g} -> {self.after:g}{by} at {later.label} "
            f"({later.when}), the run before was {earlier.label}"
        ]
        differed = differences(earlier.environment, later.environment)
        lines += [f"  {line}" for line in differed or ["the environment is the same"]]
        return "\n".join(lines)


def require_library() -> None:
    """Raise ``CannotCompare`` where the library that finds changes of times is not installed."""
    if importlib.util.find_spec("ruptures") is None:
        raise CannotCompare(_MISSING)


def change_points(trend: Trend) -> Iterator[ChangePoint]:
    """Yield the changes of a trend, the oldest first."""
    values = [point.value for point in trend.points]
    firsts = _differing(values) if trend.exact else _segments(values)
    for begin, first, end in zip([0, *firsts], firsts, [*firsts[1:], len(values)], strict=False):
        before, after = (
            round(median(each), 3) for each in (values[begin:first], values[first:end])
        )
        yield ChangePoint(trend, first, before, after)


def _differing(values: Sequence[float]) -> list[int]:
    return [at for at, (old, new) in enumerate(pairwise(values), 1) if old != new]


def _segments(values: Sequence[float]) -> list[int]:
    """Return where segments begin but for the first, as ruptures divides the values."""
    if len(values) < 2 * _LEAST_RUNS:
        return []
    import numpy as np
    from ruptures import KernelCPD

    logs = np.log(np.asarray(values)).reshape(-1, 1)
    # With this penalty 1 to 4 of 100 histories of 8 to 150 runs that never changed show a change.
    penalty = 1 + math.log(len(values)) / 2
    found = KernelCPD(kernel="rbf", min_size=_LEAST_RUNS).fit(logs).predict(pen=penalty)
    return [int(first) for first in found[:-1]]
