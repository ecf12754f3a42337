"""The few large examples of a run: histories of many rows, and wide mixes."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pytest_roseinfer import settings
from pytest_roseinfer.capabilities.observation import in_words
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.histories.large import SEQUENCES, large_histories
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import RequestMix

_Large = TypeVar("_Large", "History", "RequestMix")


class LargeSearch(Generic[_Large]):
    """The large examples of a target, each with twice its share of the time that is left."""

    check_name: ClassVar[str]
    """Name among ``CHECKS`` of the check that runs again what failed."""
    seconds: ClassVar[float]
    """The time for all of them."""

    def __init__(self, adapter: type[Any]) -> None:
        self.adapter = adapter
        self.target = coverage.current().of(adapter)
        self.ends = math.inf
        """When the example ends that is being run, be it done or not."""

    def run(self, ends: float) -> None:
        """Check them all. None begins after ``ends``."""
        from hypothesis.strategies import just

        from pytest_roseinfer.search.search import Search

        settings.require_plugin()
        for example in self._in_turn(list(self.examples())):
            drawn = just(example)
            search = Search(self.adapter, self.check, drawn, 1, self.check_name, ends=ends)
            search.run()
            self.target.large_cut_short += search.left_out

    def examples(self) -> Iterator[_Large]:
        """Yield those of this part of the test."""
        raise NotImplementedError

    def steps(self, example: _Large) -> Iterator[None]:
        """Run an example; yield behind each step."""
        raise NotImplementedError

    def hint(self) -> str:
        """Say how to state what a target is made for, where an example raised an error."""
        raise NotImplementedError

    def check(self, example: _Large) -> None:
        """Run an example as far as the time allows. One that failed runs on, to be made smaller."""
        try:
            for _ in self.steps(example):
                if monotonic() > self.ends:
                    self.target.large_cut_short += 1
                    break
        except Difference as failure:
            self.ends = math.inf
            if failure.__cause__:
                failure.added.append(self.hint())
            raise

    def _in_turn(self, due: Sequence[_Large]) -> Iterator[_Large]:
        left = self.seconds
        for done, example in enumerate(due):
            began = monotonic()
            self.ends = began + left * 2 / (len(due) - done + 1)
            yield example
            left = max(0.0, left - (monotonic() - began))


def for_paths(
    adapter: type[Adapter], usual: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """List what the adapter's paths need, on top of what is usual, and others.

    What two of them need is run once, in the part of the test that has the first of these.
    """
    paths = [adapter.paths[name] for name in coverage.current().of(adapter).paths]
    needed: list[Mapping[str, Any]] = [next(iter(path.runs_with), {}) for path in paths]
    due = [*({**usual, **each} for each in needed), *others] or [usual]
    own = settings.current().part.share_of(range(len(due)))
    return [due[at] for at in own if due[at] not in due[:at]]


# Runs the large histories of one cache.


class LargeHistories(LargeSearch[History]):
    """Two histories for each setting that paths need."""

    check_name = "run_history"
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
