"""Few large examples of a run: histories of many rows, and wide mixes."""

from __future__ import annotations

import math
from itertools import chain, zip_longest
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pytest_roseinfer import settings
from pytest_roseinfer.capabilities.observation import describe_error
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.histories.history import History
from pytest_roseinfer.histories.large import MOST_ROWS, large_histories
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import RequestMix

_Large = TypeVar("_Large", "History", "RequestMix")


class LargeSearch(Generic[_Large]):
    """Large examples of a target, each with up to twice its share of the remaining time."""

    check_name: ClassVar[str]
    """Name in ``CHECKS`` of the check that replays a failure."""
    seconds: ClassVar[float]
    """Seconds for all examples."""

    def __init__(self, adapter: type[Any]) -> None:
        self.adapter = adapter
        self.target = coverage.current().of(adapter)
        self.ends = math.inf
        """Deadline of the running example, which is then cut short, in ``monotonic`` time."""

    def run(self, ends: float) -> None:
        """Check all examples; none starts after ``ends``."""
        from hypothesis.strategies import just

        from pytest_roseinfer.search.search import Search

        settings.require_plugin()
        for example in self._in_turn(list(self.examples())):
            drawn = just(example)
            search = Search(self.adapter, self.check, drawn, 1, self.check_name, ends=ends)
            search.run()
            self.target.large_cut_short += search.num_skipped

    def examples(self) -> Iterator[_Large]:
        """Yield the examples of this part of the test."""
        raise NotImplementedError

    def steps(self, example: _Large) -> Iterator[None]:
        """Run an example; yield after each step."""
        raise NotImplementedError

    def hint(self) -> str:
        """Explain how to declare a target's limits, for an example that raised an error."""
        raise NotImplementedError

    def check(self, example: _Large) -> None:
        """Run an example until its deadline; after a failure, shrinking has no deadline."""
        try:
            for _ in self.steps(example):
                if monotonic() > self.ends:
                    self.target.large_cut_short += 1
                    break
        except Difference as failure:
            self.ends = math.inf
            if failure.__cause__:
                failure.extra_paragraphs.append(self.hint())
            raise

    def _in_turn(self, examples: Sequence[_Large]) -> Iterator[_Large]:
        current = settings.current()
        # Parts share the processors; on a GPU they mostly wait for compilers.
        remaining_s = self.seconds if current.gpu else self.seconds / current.part.of
        for done, example in enumerate(examples):
            began = monotonic()
            self.ends = began + remaining_s * 2 / (len(examples) - done + 1)
            yield example
            remaining_s = max(0.0, remaining_s - (monotonic() - began))


def for_paths(
    adapter: type[Adapter], usual: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """List the switches of the adapter's paths, on top of the ``usual`` ones, and ``others``.

    Equal switches are listed once, in the part of the test that has the first of them.
    """
    paths = [adapter.paths[name] for name in coverage.current().of(adapter).paths]
    needed: list[Mapping[str, Any]] = [next(iter(path.settings_to_draw), {}) for path in paths]
    candidates = [*({**usual, **each} for each in needed), *others] or [usual]
    indices = settings.current().part.share_of(range(len(candidates)))
    return [candidates[at] for at in indices if candidates[at] not in candidates[:at]]


# Large histories.


class LargeHistories(LargeSearch[History]):
    """Large histories: three per setting that paths need."""

    check_name = "run_history"
    seconds = 6.0
    """A small cache takes less than one second per choice of switches."""

    def examples(self) -> Iterator[History]:
        usual = {name: values[0] for name, values in self.adapter.option_choices.items()}
        by_options = (
            reversed([*large_histories(self.adapter, options, settings.current().device)])
            for options in for_paths(self.adapter, usual)
        )
        # The widest batches of all settings first: they have the fewest steps.
        yield from filter(None, chain.from_iterable(zip_longest(*by_options)))

    def steps(self, example: History) -> Iterator[None]:
        machine = self._make_runner(example)
        try:
            for counted in machine.steps():
                self.target.large_counts.update(counted)
                self.target.note_sizes(machine.completed_steps[-1], machine.oracle)
                yield
        finally:
            self.target.invariant_checks.update(machine.invariant_checks)

    def _make_runner(self, history: History) -> HistoryRunner:
        try:
            return HistoryRunner(self.adapter, history)
        except Difference:
            raise
        except Exception as error:
            problem = (
                f"a new cache of {history.spec.num_blocks} blocks raised {describe_error(error)}"
            )
            difference = Difference(problem, history.describe)
            difference.kind = f"raised {type(error).__name__} in make"
            raise difference from error

    def hint(self) -> str:
        return (
            f"This is a large history, of up to {MOST_ROWS} sequences at a time and of hundreds of "
            f"tokens in one. If {self.adapter.__name__} does not support that, declare its "
            "maximum: max_sequences, max_tokens."
        )
