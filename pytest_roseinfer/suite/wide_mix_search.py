"""Runs the wide mixes of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.mix import RequestMix
from pytest_roseinfer.engines.run import MixRun, failing_on
from pytest_roseinfer.engines.wide_mixes import REQUESTS, wide_mix, wide_settings
from pytest_roseinfer.suite.large_search import LargeSearch, for_paths

if TYPE_CHECKING:
    from collections.abc import Iterator


class WideMixes(LargeSearch[RequestMix]):
    """One mix for each setting that paths need, and some with all values of all switches."""

    replayed_by = "run_mix"
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
