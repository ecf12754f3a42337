"""Results of each planted bug, over all its seeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, RANDOM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.mutants.jobs import Outcome
    from tests.mutants.mutant import Mutant


@dataclass(slots=True)
class Result:
    """All outcomes for one mutant."""

    mutant: Mutant
    searches: list[Outcome] = field(default_factory=list)
    random: list[Outcome] = field(default_factory=list)
    examples: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        if outcome.kind in (HUNT, DIRECTED):
            self.searches.append(outcome)
        elif outcome.kind == RANDOM:
            self.random.append(outcome)
        elif outcome.kind == EXAMPLES:
            self.examples = outcome

    @property
    def survived(self) -> bool:
        """True if a search missed the bug, or if there was no search."""
        return not self.searches or not all(outcome.killed for outcome in self.searches)

    @property
    def killed(self) -> str:
        return _of(self.searches)

    @property
    def killed_by_random(self) -> str:
        return _of(self.random)

    @property
    def killed_by_examples(self) -> str:
        if self.examples is None:
            return ""
        return "yes" if self.examples.killed else "no"

    @property
    def checks(self) -> str:
        """Checks that failed, the most frequent first."""
        counted = Counter(outcome.check for outcome in self.searches if outcome.killed)
        return ", ".join(check.replace("_", " ") for check, _ in counted.most_common())

    @property
    def median_examples(self) -> float:
        return median(outcome.examples for outcome in self.searches)

    @property
    def max_examples(self) -> int:
        return max(outcome.examples for outcome in self.searches)

    @property
    def median_seconds(self) -> float:
        return median(outcome.seconds for outcome in self.searches)


def _of(outcomes: list[Outcome]) -> str:
    """Return how many outcomes found the bug: ``9/10``."""
    if not outcomes:
        return ""
    return f"{sum(outcome.killed for outcome in outcomes)}/{len(outcomes)}"


def sum_up(mutants: Iterable[Mutant], outcomes: Iterable[Outcome]) -> list[Result]:
    results = {mutant.name: Result(mutant) for mutant in mutants}
    for outcome in outcomes:
        if outcome.mutant in results:
            results[outcome.mutant].add(outcome)
    return list(results.values())
