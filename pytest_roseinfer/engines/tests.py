"""The tests every engine gets."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer import settings
from pytest_roseinfer.engines.run import run_forks, run_mix
from pytest_roseinfer.running import coverage
from pytest_roseinfer.running.shipped_tests import ShippedTests
from pytest_roseinfer.search.budget import in_turns, turns_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.engines.mix import RequestMix

_SHARE = 0.8
"""Of a profile's examples: one is a whole engine, and many requests."""
_FORK_SHARE = 0.15
_EXAMPLES_OF_A_TURN = 4
_FORKS_AGAIN = 2


class EngineTests(ShippedTests):
    """What ``conformance(Adapter)`` returns a subclass of, for an engine."""

    adapter: ClassVar[type[EngineAdapter]]

    def test_requests_get_what_they_get_alone(self) -> None:
        """Whatever comes before, beside and after, and however little room there is."""
        target = coverage.current().of(self.adapter)
        target.searched = True
        examples = round(settings.current().examples * _SHARE)
        missing = partial(target.still_missing, since=Counter(target.counts))
        for aim, turn, due in in_turns(target.paths, examples, _EXAMPLES_OF_A_TURN):
            self._search(run_mix, due, aim, turn)
        for aim, turn, due in turns_again(missing, _EXAMPLES_OF_A_TURN):
            self._search(run_mix, due, aim, turn)
            if self.adapter.defines("forked"):  # which may be all that takes this path
                self._search(run_forks, _FORKS_AGAIN, aim, turn)

    def test_forks_get_what_requests_of_their_own_get(self) -> None:
        if not self.adapter.defines("forked"):
            import pytest

            pytest.skip(f"{self.adapter.__name__} does not offer forked()")
        self._search(run_forks, round(settings.current().examples * _FORK_SHARE))

    def _search(
        self,
        check: Callable[[type[EngineAdapter], RequestMix], Counter[str]],
        examples: int,
        aim: str | None = None,
        turn: str = "0",
    ) -> None:
        from pytest_roseinfer.engines.strategies import request_mixes
        from pytest_roseinfer.search.search import search

        target = coverage.current().of(self.adapter)
        asked = settings.current()

        def attempt(mix: RequestMix) -> None:
            target.note(check(self.adapter, mix))
            target.histories += 1

        search(
            self.adapter,
            attempt,
            request_mixes(self.adapter, most_steps=asked.steps, device=asked.device, aim=aim),
            examples=max(1, examples),
            replayed_by=check.__name__,
            salt=f"{aim} {turn}",
        )
