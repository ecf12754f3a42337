"""A search of what is slow keeps to its time, says so, and claims no strength."""

from __future__ import annotations

import json
import math
from time import monotonic, sleep
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import Divergence, conformance, settings
from pytest_roseinfer.report.verdict import SearchReporter, TargetVerdict
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyForks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tests.project import Project

SECONDS = 0.2
STEP = 0.02


class SlowCache(ListCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        sleep(STEP)
        super().append(seqs, key, value)


class WrongAndSlow(SlowCache):
    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        sleep(SECONDS)
        super().append(seqs, -key, value)


class SlowEngine(ToyForks):
    def step(self) -> None:
        sleep(STEP)
        super().step()


@pytest.fixture
def seen() -> Iterator[coverage.Coverage]:
    asked, before, own = settings.current(), coverage.current(), coverage.Coverage()
    settings.set_current(settings.Settings(examples=40, seed=1, search_seconds=SECONDS))
    coverage.set_current(own)
    try:
        yield own
    finally:
        settings.set_current(asked)
        coverage.set_current(before)


@pytest.mark.parametrize(("adapter", "examples"), [(SlowCache, 40 + 4 + 4), (SlowEngine, 64 + 6)])
def test_no_test_searches_longer_than_it_may(
    seen: coverage.Coverage, adapter: type[SlowCache | SlowEngine], examples: int
) -> None:
    tests = conformance(adapter)()
    for test in tests.shipped():
        began = monotonic()
        try:
            getattr(tests, test)()
        except pytest.skip.Exception:
            continue
        assert monotonic() - began < SECONDS + 5  # the last example began in time
    target = seen.of(adapter)
    assert target.examples == examples
    assert 0 < target.num_skipped < examples
    left = examples - target.num_skipped
    assert TargetVerdict(target).cut_short.startswith(
        f"searched {left} of {examples} examples in the time"
    )


def test_what_fails_as_the_time_ends_is_told_all_the_same(seen: coverage.Coverage) -> None:
    with pytest.raises(Divergence) as caught:
        conformance(WrongAndSlow)().test_histories()
    assert caught.value.history.size == 1
    assert seen.of(WrongAndSlow).failed


def test_a_search_that_may_take_any_time_leaves_nothing_out(seen: coverage.Coverage) -> None:
    settings.set_current(settings.Settings(examples=4, seed=1, search_seconds=0))
    assert settings.current().search_ends() == math.inf
    conformance(SlowCache)().test_histories()
    assert (seen.of(SlowCache).examples, seen.of(SlowCache).num_skipped) == (4, 0)
    assert not TargetVerdict(seen.of(SlowCache)).cut_short


def test_a_path_that_was_not_reached_in_time_says_so() -> None:
    target = coverage.TargetCoverage({"fast": "slow"}, [], searched=True, histories=1)
    target.add_examples(9, 0)
    assert "in the time limit" not in TargetVerdict(target).warnings()[0]
    target.add_examples(1, 1)
    assert "; searched 9 of 10 examples in the time limit" in TargetVerdict(target).warnings()[0]
    target.eligible_examples["fast"] = coverage.CONCLUSIVE_EXAMPLES
    assert (
        "; searched 9 of 10 examples in the time limit"
        in TargetVerdict(target).problems(require_paths=True)[0]
    )


def test_a_strength_is_claimed_of_whole_searches_alone(seen: coverage.Coverage) -> None:
    searched = SearchReporter(settings.Settings())
    seen.of(SlowCache).add_examples(10, 0)
    searched.pytest_terminal_summary()
    assert "planted bugs" in searched.in_words(1)
    seen.of(ListCache).add_examples(10, 1)
    searched.pytest_terminal_summary()
    assert "planted bugs" not in searched.in_words(1)
    assert "some searches ended before they had tried all" in searched.in_words(1)


def test_a_run_says_how_much_it_left_out(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it="""
            from time import sleep

            from caches.list_cache import ListCache
            from pytest_roseinfer import conformance

            class Slow(ListCache):
                def append(self, seqs, key, value):
                    sleep(0.02)
                    super().append(seqs, key, value)

            TestSlow = conformance(Slow)
        """
    )
    said = ["--roseinfer-search-seconds=0.1", "--roseinfer-report=a.json"]
    result = project.pytest("-k", "histories", *said, "--roseinfer-report=a.html")
    line = "searched * of 100 examples in the time limit (--roseinfer-search-seconds): this is *"
    result.stdout.fnmatch_lines([line])
    (target,) = json.loads((project.path / "a.json").read_text())["targets"]
    assert target["cut_short"] in result.stdout.str()
    assert (target["examples"], target["left_out"] > 0) == (100, True)
    assert target["cut_short"] in (project.path / "a.html").read_text()
