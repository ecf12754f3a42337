"""The checks that an example can be run by, and how often one of them fails."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.engines.run import run_forks, run_mix
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.run.machine import run_history
from pytest_roseinfer.run.metamorphic import (
    ROOMY,
    check_copied,
    check_every_option,
    check_permuted,
    check_split,
    roomy,
)
from pytest_roseinfer.run.watchdog import StoppedAnswering

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

Example = History | RequestMix
_OF_MIXES = (run_mix, run_forks)
_OF_HISTORIES = (run_history, check_permuted, check_split, check_copied, check_every_option)
CHECKS: dict[str, Callable[[type[Any], Any], Counter[str]]] = {
    check.__name__: check for check in (*_OF_HISTORIES, *_OF_MIXES)
}
"""The checks that can be run on an example, by the name a trace gives each."""
REPEAT_SECONDS = 60.0
"""Seconds between the beginnings of the first and the last try, at most."""


def kind_of_example(check: str) -> type[Example]:
    """Return the class of the examples of a check."""
    return RequestMix if CHECKS[check] in _OF_MIXES else History


def example_as_run(check: str, adapter: type[Any], example: Example) -> Example:
    """Return the example that a check runs: some give a history more room first."""
    if check in ROOMY and isinstance(example, History):
        return roomy(adapter, example)
    return example


@dataclass(frozen=True, slots=True)
class Repetition:
    """The failures among several runs of one example."""

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


def repeat(check: Callable[[], object], times: int, seconds: float = REPEAT_SECONDS) -> Repetition:
    """Run a check up to ``times`` times within the time; what stopped answering is run no more."""
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
    return Repetition(tried, tuple(failures))
