"""Runs the large histories of one cache, within the time that there is for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.cases.large.histories import SEQUENCES, large_histories
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.findings.finding import in_words
from pytest_roseinfer.running import coverage
from pytest_roseinfer.running.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.cases.history import History

_SECONDS = 6.0
"""A small cache takes less than one; each choice of switches that paths need adds as much again."""


@dataclass(slots=True)
class LargeSearch:
    """The large histories of a cache, each with twice its share of the time that is left."""

    adapter: type[KVCacheAdapter]
    ends: float = math.inf
    """When the history ends that is being run, be it done or not."""

    def histories(self) -> Iterator[History]:
        """Yield them, once for each choice of switches that paths of this part need."""
        device, left = settings.current().device, _SECONDS
        due = [
            history
            for options in self._switches()
            for history in large_histories(self.adapter, options, device)
        ]
        for done, history in enumerate(due):
            began = monotonic()
            self.ends = began + left * 2 / (len(due) - done + 1)
            yield history
            left = max(0.0, left - (monotonic() - began))

    def check(self, history: History) -> None:
        """Run a history as far as the time allows. One that failed runs on, to be made smaller."""
        try:
            self._run(history)
        except Difference as failure:
            self.ends = math.inf
            if failure.__cause__:
                failure.added.append(self._hint())
            raise

    def _switches(self) -> list[Mapping[str, Any]]:
        """List what paths need that this part of the test has.

        What two of them need is run once, in the part that has the first of these.
        """
        paths: list[str | None] = [*coverage.current().of(self.adapter).paths] or [None]
        usual = {name: values[0] for name, values in self.adapter.option_choices.items()}
        first: dict[str | None, Mapping[str, Any]] = {}
        for aim in paths:
            needed = self.adapter.paths[aim].runs_with if aim else ()
            options = {**usual, **next(iter(needed), {})}
            if options not in first.values():
                first[aim] = options
        return [first[aim] for aim in settings.current().part.share_of(paths) if aim in first]

    def _run(self, history: History) -> None:
        target = coverage.current().of(self.adapter)
        machine = self._begun(history)
        try:
            for _ in machine.steps():
                target.note_sizes(machine.done[-1], machine.oracle)
                if monotonic() > self.ends:
                    target.large_cut_short += 1
                    break
        finally:
            target.checked.update(machine.checked)

    def _begun(self, history: History) -> Machine:
        try:
            return Machine(self.adapter, history)
        except Difference:
            raise
        except Exception as error:
            what = f"a new cache of {history.spec.num_blocks} blocks raised {in_words(error)}"
            raise Difference(what, history.words) from error

    def _hint(self) -> str:
        return (
            f"This is a large history, of up to {SEQUENCES} sequences at a time and of hundreds of "
            f"tokens in one. If {self.adapter.__name__} is not made for so many, state what it is "
            "made for: most_sequences, most_tokens."
        )
