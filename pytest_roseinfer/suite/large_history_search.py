"""Runs the large histories of one cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.cases.history import History
from pytest_roseinfer.cases.large.histories import SEQUENCES, large_histories
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.findings.finding import in_words
from pytest_roseinfer.running.machine import Machine
from pytest_roseinfer.suite.large_search import LargeSearch, for_paths

if TYPE_CHECKING:
    from collections.abc import Iterator


class LargeHistories(LargeSearch[History]):
    """Two histories for each setting that paths need."""

    replayed_by = "run_history"
    seconds = 6.0
    """A small cache takes less than one; each choice of switches adds as much again."""

    def examples(self) -> Iterator[History]:
        usual = {name: values[0] for name, values in self.adapter.option_choices.items()}
        for options in for_paths(self.adapter, usual):
            yield from large_histories(self.adapter, options, settings.current().device)

    def steps(self, example: History) -> Iterator[None]:
        machine = self._begun(example)
        try:
            for counted in machine.steps():
                self.target.large.update(counted)
                self.target.note_sizes(machine.done[-1], machine.oracle)
                yield
        finally:
            self.target.checked.update(machine.checked)

    def _begun(self, history: History) -> Machine:
        try:
            return Machine(self.adapter, history)
        except Difference:
            raise
        except Exception as error:
            what = f"a new cache of {history.spec.num_blocks} blocks raised {in_words(error)}"
            raise Difference(what, history.words) from error

    def hint(self) -> str:
        return (
            f"This is a large history, of up to {SEQUENCES} sequences at a time and of hundreds of "
            f"tokens in one. If {self.adapter.__name__} is not made for so many, state what it is "
            "made for: most_sequences, most_tokens."
        )
