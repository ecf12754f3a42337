"""The test class that every engine gets, and its wide mixes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, NoReturn

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.engines.run import MixRun, failing_on, run_forks
from pytest_roseinfer.engines.strategies import REQUESTS, wide_mix, wide_settings
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.coverage import Preludes
from pytest_roseinfer.suite.large_search import LargeSearch, for_paths
from pytest_roseinfer.suite.shipped_tests import ShippedTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.engine import EngineAdapter

# Runs the wide mixes of one engine.


class WideMixes(LargeSearch[RequestMix]):
    """One mix for each setting that paths need, and some with all values of all switches."""

    check_name = "run_mix"
    seconds = 12.0
    """Of roseinfer's own engine, most of them reach all of their requests in that."""

    def examples(self) -> Iterator[RequestMix]:
        wide = wide_settings(self.adapter.option_choices)
        for options in for_paths(self.adapter, wide[0], wide):
            yield wide_mix(self.adapter, options, settings.current().device)

    def steps(self, example: RequestMix) -> Iterator[None]:
        with failing_on(self.adapter, example):
            run = MixRun(self.adapter, example)
            for _ in run.steps():
                self.target.note_largest(run.largest)
                yield
            self.target.large.update(run.finish())

    def hint(self) -> str:
        return (
            f"This is a wide mix, of up to {REQUESTS} requests at a time. If "
            f"{self.adapter.__name__} is not made for so many, state what it is made for: "
            "most_requests."
        )


_SHARE = 1.6
"""So many mixes are drawn for each example of a profile: most take less time than a history."""
_LEAST_STEPS = 4
"""The length of mixes that aim at what takes long."""
_FORK_SHARE = 0.15
_EXAMPLES_OF_A_TURN = 4
_SECONDS_OF_LARGE_MIXES = 6.0
"""No mix begins later; where its kernels are compiled first, the last takes some seconds more."""


class EngineTests(ShippedTests):
    """``conformance(Adapter)`` returns a subclass of this for an engine."""

    adapter: ClassVar[type[EngineAdapter]]
    most_parts: ClassVar[Mapping[str, int]] = {"test_requests_get_what_they_get_alone": 6}

    def test_requests_get_what_they_get_alone(self) -> None:
        """Neither other requests nor a lack of room change what a request gets."""
        target = coverage.current().of(self.adapter)
        target.searched = True
        examples = round(settings.current().examples * _SHARE)
        since = Counter(target.counts)
        preludes = Preludes["RequestMix"](partial(target.short, since), target.paths)
        ends = settings.current().search_ends()
        for aim, turn, due in coverage.in_turns(self.adapter, examples, _EXAMPLES_OF_A_TURN):
            left_out = self._search("run_mix", due, aim, turn, ends=ends, preludes=preludes)
            target.searched_for(due, left_out)
        # After the drawn ones, which show most bugs smaller.
        WideMixes(self.adapter).run(ends)
        missing = partial(target.still_missing, since)
        for aim, turn, due in coverage.turns_again(missing, _EXAMPLES_OF_A_TURN, ends):
            self._search("run_mix", due, aim, turn, ends=ends, preludes=preludes)
            if self.adapter.defines("fork"):  # which may be all that takes this path
                self._search("run_forks", 2, aim, turn, ends=ends)

    def test_requests_of_any_size_get_what_they_get_alone(self) -> None:
        """No size of blocks, prompts, batches or the cache changes it (on a GPU alone)."""
        from pytest_roseinfer.engines.strategies import large_mixes

        device = settings.current().device
        if not self.adapter.sizes or device == "cpu":
            _skip(f"{self.adapter.__name__} has no sizes to vary, or there is no GPU")
        drawn = large_mixes(self.adapter, device=device, few=3)
        ends = monotonic() + _SECONDS_OF_LARGE_MIXES
        for turn in count():
            if monotonic() > ends:
                break
            self._search(
                "run_mix", _EXAMPLES_OF_A_TURN, turn=f"sizes {turn}", drawn=drawn, ends=ends
            )

    def test_forks_get_what_requests_of_their_own_get(self) -> None:
        if not self.adapter.defines("fork"):
            _skip(f"{self.adapter.__name__} does not offer fork()")
        options = settings.current()
        examples = max(1, round(options.examples * _FORK_SHARE))
        left_out = self._search("run_forks", examples, ends=options.search_ends())
        coverage.current().of(self.adapter).searched_for(examples, left_out)

    def _served(self, mix: RequestMix) -> Counter[str]:
        with failing_on(self.adapter, mix):
            run = MixRun(self.adapter, mix)
            try:
                return run.run()
            finally:
                coverage.current().of(self.adapter).note_largest(run.largest)

    def _search(
        self,
        name: str,
        examples: int,
        aim: str | None = None,
        turn: str = "0",
        *,
        drawn: SearchStrategy[RequestMix] | None = None,
        ends: float,
        preludes: Preludes[RequestMix] | None = None,
    ) -> int:
        """Check mixes as ``drawn``, else small ones; return how many ``ends`` left out."""
        from pytest_roseinfer.engines.strategies import request_mixes
        from pytest_roseinfer.search.search import Search

        settings.require_plugin()
        target, options = coverage.current().of(self.adapter), settings.current()
        if drawn is None:
            share = self.adapter.paths[aim].share if aim else 1
            steps = max(_LEAST_STEPS, round(options.steps * share))
            drawn = request_mixes(
                self.adapter,
                most_steps=steps,
                device=options.device,
                aim=aim,
                preludes=preludes.of(aim) if preludes else (),
            )

        def attempt(mix: RequestMix) -> None:
            forks = name == "run_forks"
            counted = run_forks(self.adapter, mix) if forks else self._served(mix)
            target.note(counted)
            target.note_tried(self.adapter, mix.options)
            if preludes:
                preludes.note(counted, lambda: mix)
            target.histories += 1

        search = Search(
            self.adapter,
            attempt,
            drawn,
            examples=examples,
            name=name,
            salt=f"{aim} {turn}",
            ends=ends,
        )
        search.run()
        return search.left_out


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)
