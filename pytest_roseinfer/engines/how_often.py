"""How often a check fails on one case, where that depends on more than what is done: on time, or
on how much was asked before."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running.adapter_findings import StoppedAnswering

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 60.0
"""No try begins later than so long after the first."""


@dataclass(frozen=True, slots=True)
class HowOften:
    """What came of running one case several times."""

    tried: int
    failures: tuple[Difference, ...]

    def words(self) -> str:
        if self.failures:
            return f"it differed in {len(self.failures)} of {self.tried}"
        times = f" {self.tried} times" if self.tried > 1 else ""
        return f"it ran through{times}: nothing differed"

    def require_none(self) -> None:
        """Raise the first failure, which says how many there were."""
        for failure in self.failures[:1]:
            if self.tried > 1:
                failure.added.append(self.words())
            raise failure


def how_often(check: Callable[[], object], times: int, seconds: float = SECONDS) -> HowOften:
    """Run a check so many times, or as often as there is time for; what is gone ends it."""
    ends = monotonic() + seconds
    tried, failures = 0, []
    while tried < times and (not tried or monotonic() < ends):
        tried += 1
        try:
            check()
        except Difference as failure:
            failures.append(failure)
            if isinstance(failure.__cause__, StoppedAnswering):
                break
    return HowOften(tried, tuple(failures))
