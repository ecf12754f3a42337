"""Test class for engines, and their wide mixes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, NoReturn

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.engines.run import MixRun, failing_on, run_forks
from pytest_roseinfer.engines.sensitivity import describe_blindness
from pytest_roseinfer.engines.strategies import REQUESTS, wide_mix, wide_settings
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.coverage import Preludes
from pytest_roseinfer.suite.kept_failures import replay_kept
from pytest_roseinfer.suite.large_search import LargeSearch, for_paths
from pytest_roseinfer.suite.shipped_tests import ShippedTests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hypothesis.strategies import SearchStrategy

    from pytest_roseinfer.adapters.engine import EngineAdapter

# Wide mixes.


class WideMixes(LargeSearch[RequestMix]):
    """Wide mixes: one per setting that paths need, and some that cover all switches' values."""

    check_name = "run_mix"
    seconds = 12.0
    """Enough for most wide mixes of roseinfer's own engine to serve all of their requests."""

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
            self.target.large_counts.update(run.finish())

    def hint(self) -> str:
        return (
            f"This is a wide mix, of up to {REQUESTS} requests at a time. If "
            f"{self.adapter.__name__} does not support that, declare its maximum: max_requests."
        )


_SHARE = 1.6
"""Mixes drawn per example of a profile: most mixes take less time than a history."""
_LEAST_STEPS = 4
"""Minimum steps of mixes that aim at slow paths."""
_FORK_SHARE = 0.15
_EXAMPLES_OF_A_TURN = 4
_SECONDS_OF_LARGE_MIXES = 6.0
"""Time limit in seconds for the start of mixes; the last may take some seconds more to compile
kernels."""


class EngineTests(ShippedTests):
    """Tests of an engine; ``conformance(Adapter)`` derives a class from this one."""

    adapter: ClassVar[type[EngineAdapter]]
    max_parts: ClassVar[Mapping[str, int]] = {"test_requests_get_what_they_get_alone": 6}

    def test_requests_get_what_they_get_alone(self) -> None:
        """Check that neither other requests nor a lack of room change a request's output."""
        target = coverage.current().of(self.adapter)
        target.searched = True
        if kept := settings.current().kept_traces:
            replay_kept(self.adapter, kept)
        target.blindness = describe_blindness(self.adapter)
        examples = round(settings.current().examples * _SHARE)
        since = Counter(target.counts)
        preludes = Preludes["RequestMix"](partial(target.names_below_required, since), target.paths)
        ends = settings.current().search_ends()
        turns = coverage.split_examples(self.adapter, examples, _EXAMPLES_OF_A_TURN)
        planned = sum(turn.examples for turn in turns)
        duration = coverage.SearchDuration(self.adapter.__name__, planned, "mixes")
        for turn in turns:
            num_skipped = self._search("run_mix", turn, ends=ends, preludes=preludes)
            target.add_examples(turn.examples, num_skipped)
            duration.note(turn.examples)
        # After the drawn ones, which find most bugs with smaller examples.
        WideMixes(self.adapter).run(ends)
        missing = partial(target.missing_paths, since)
        ends = settings.current().further_ends(ends)
        for turn in coverage.repeat_searches(missing, _EXAMPLES_OF_A_TURN, ends):
            self._search("run_mix", turn, ends=ends, preludes=preludes)
            if self.adapter.defines("fork"):  # the path may need forks
                self._search("run_forks", turn._replace(examples=2), ends=ends)

    def test_requests_of_any_size_get_what_they_get_alone(self) -> None:
        """Check that no size of blocks, prompts, batches or the cache changes it (on a GPU)."""
        from pytest_roseinfer.engines.strategies import large_mixes

        device = settings.current().device
        if not self.adapter.sizes or device == "cpu":
            _skip(f"{self.adapter.__name__} has no sizes to vary, or this run has no GPU")
        drawn = large_mixes(self.adapter, device=device, few=3)
        ends = monotonic() + _SECONDS_OF_LARGE_MIXES
        for at in count():
            if monotonic() > ends:
                break
            turn = coverage.Turn(None, f"sizes {at}", _EXAMPLES_OF_A_TURN)
            self._search("run_mix", turn, drawn=drawn, ends=ends)

    def test_forks_get_what_requests_of_their_own_get(self) -> None:
        if not self.adapter.defines("fork"):
            _skip(f"{self.adapter.__name__} does not offer fork()")
        options = settings.current()
        examples = max(1, round(options.examples * _FORK_SHARE))
        turn = coverage.Turn(None, "0", examples)
        num_skipped = self._search("run_forks", turn, ends=options.search_ends())
        coverage.current().of(self.adapter).add_examples(examples, num_skipped)

    def _serve(self, mix: RequestMix) -> Counter[str]:
        with failing_on(self.adapter, mix):
            run = MixRun(self.adapter, mix)
            try:
                return run.run()
            finally:
                coverage.current().of(self.adapter).note_largest(run.largest)

    def _search(
        self,
        name: str,
        turn: coverage.Turn,
        *,
        drawn: SearchStrategy[RequestMix] | None = None,
        ends: float,
        preludes: Preludes[RequestMix] | None = None,
    ) -> int:
        """Check mixes of ``drawn``, else small ones; return the number that ``ends`` skipped."""
        from pytest_roseinfer.engines.strategies import request_mixes
        from pytest_roseinfer.search.search import Search

        settings.require_plugin()
        target, options = coverage.current().of(self.adapter), settings.current()
        aim = turn.aim
        if drawn is None:
            share = self.adapter.paths[aim].share if aim else 1
            steps = max(_LEAST_STEPS, round(options.steps * share))
            drawn = request_mixes(
                self.adapter,
                max_steps=steps,
                device=options.device,
                aim=aim,
                first_setting=turn.first_setting,
                preludes=preludes.of(aim) if preludes else (),
            )

        def attempt(mix: RequestMix) -> None:
            forks = name == "run_forks"
            counted = run_forks(self.adapter, mix) if forks else self._serve(mix)
            target.note(counted)
            target.note_tried(self.adapter, mix.options)
            if preludes:
                preludes.note(counted, lambda: mix)
            target.histories += 1

        search = Search(
            self.adapter,
            attempt,
            drawn,
            examples=turn.examples,
            name=name,
            salt=f"{aim} {turn.name}",
            ends=ends,
        )
        search.run()
        return search.num_skipped


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)
