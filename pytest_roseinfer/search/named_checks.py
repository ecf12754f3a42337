"""Checks of an example by their names, and repetition of a check."""

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
from pytest_roseinfer.run.watchdog import TargetGoneError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

Example = History | RequestMix
_OF_MIXES = (run_mix, run_forks)
_OF_HISTORIES = (run_history, check_permuted, check_split, check_copied, check_every_option)
CHECKS: dict[str, Callable[[type[Any], Any], Counter[str]]] = {
    check.__name__: check for check in (*_OF_HISTORIES, *_OF_MIXES)
}
"""Checks by their names in traces."""
REPEAT_SECONDS = 60.0
"""Maximum seconds between the starts of the first and the last try."""


def kind_of_example(check: str) -> type[Example]:
    """Return the class of a check's examples."""
    return RequestMix if CHECKS[check] in _OF_MIXES else History


def example_as_run(check: str, adapter: type[Any], example: Example) -> Example:
    """Return the example as the check runs it: some checks enlarge a history's cache first."""
    if check in ROOMY and isinstance(example, History):
        return roomy(adapter, example)
    return example


@dataclass(frozen=True, slots=True)
class Repetition:
    """Failures among several runs of one example."""

    num_runs: int
    failures: tuple[Difference, ...]

    def describe(self) -> str:
        if self.failures:
            return f"it differed in {len(self.failures)} of {self.num_runs}"
        times = f" {self.num_runs} times" if self.num_runs > 1 else ""
        return f"it passed{times}: nothing differed"

    def require_none(self) -> None:
        """Raise the first failure, with the number of failures in its message."""
        for failure in self.failures[:1]:
            if self.num_runs > 1:
                failure.extra_paragraphs.append(self.describe())
            raise failure


def repeat(check: Callable[[], object], times: int, seconds: float = REPEAT_SECONDS) -> Repetition:
    """Run a check up to ``times`` times within a time limit; stop if the target is gone."""
    ends = monotonic() + seconds
    num_runs, failures = 0, []
    while num_runs < times and (not num_runs or monotonic() < ends):
        num_runs += 1
        try:
            check()
        except Difference as failure:
            failures.append(failure)
            if isinstance(failure.__cause__, TargetGoneError):
                break
    return Repetition(num_runs, tuple(failures))
