"""Checks the large examples of a target, within the time that there is for them."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pytest_roseinfer import settings
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running import coverage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.mix import RequestMix
    from pytest_roseinfer.cases.history import History

_Large = TypeVar("_Large", "History", "RequestMix")


class LargeSearch(Generic[_Large]):
    """The large examples of a target, each with twice its share of the time that is left."""

    replayed_by: ClassVar[str]
    """The one of ``reproduce.CHECKS`` that is to run again what failed."""
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

        from pytest_roseinfer.search.search import search

        settings.require_plugin()
        for example in self._in_turn(list(self.examples())):
            left_out = search(
                self.adapter,
                self.check,
                just(example),
                examples=1,
                replayed_by=self.replayed_by,
                salt="",
                ends=ends,
            )
            self.target.large_cut_short += left_out  # behind the search, which adds to it too

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
