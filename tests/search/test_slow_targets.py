"""Searches of slow targets: their time limit, and its mention in reports."""

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
def search_coverage() -> Iterator[coverage.Coverage]:
    previous_settings, previous_coverage, own_coverage = (
        settings.current(),
        coverage.current(),
        coverage.Coverage(),
    )
    settings.set_current(settings.Settings(examples=40, seed=1, search_seconds=SECONDS))
    coverage.set_current(own_coverage)
    try:
        yield own_coverage
    finally:
        settings.set_current(previous_settings)
        coverage.set_current(previous_coverage)


@pytest.mark.parametrize(
    ("adapter", "examples"), [(SlowCache, 40 + 4 + 4), (SlowEngine, 64 + 1 + 6)]
)
def test_search_keeps_to_its_time_limit(
    search_coverage: coverage.Coverage, adapter: type[SlowCache | SlowEngine], examples: int
) -> None:
    tests = conformance(adapter)()
    for test in tests.shipped():
        began = monotonic()
        try:
            getattr(tests, test)()
        except pytest.skip.Exception:
            continue
        assert monotonic() - began < SECONDS + 5  # the last example began in time
    target = search_coverage.of(adapter)
    assert target.examples == examples
    assert 0 < target.num_skipped < examples
    num_run = examples - target.num_skipped
    assert TargetVerdict(target).cut_short.startswith(
        f"searched {num_run} of {examples} examples in the time"
    )


def test_failure_at_the_end_of_the_time_is_reported(search_coverage: coverage.Coverage) -> None:
    with pytest.raises(Divergence) as caught:
        conformance(WrongAndSlow)().test_histories()
    assert caught.value.history.size == 1
    assert search_coverage.of(WrongAndSlow).failed


@pytest.mark.slow
def test_search_without_a_limit_skips_no_example(search_coverage: coverage.Coverage) -> None:
    settings.set_current(settings.Settings(examples=4, seed=1, search_seconds=0))
    assert settings.current().search_ends() == math.inf
    conformance(SlowCache)().test_histories()
    assert (search_coverage.of(SlowCache).examples, search_coverage.of(SlowCache).num_skipped) == (
        4,
        0,
    )
    assert not TargetVerdict(search_coverage.of(SlowCache)).cut_short


def test_unreached_path_mentions_the_time_limit() -> None:
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


def test_strength_is_reported_for_complete_searches_only(
    search_coverage: coverage.Coverage,
) -> None:
    reporter = SearchReporter(settings.Settings())
    search_coverage.of(SlowCache).add_examples(10, 0)
    reporter.pytest_terminal_summary()
    assert "planted bugs" in reporter.in_words(1)
    search_coverage.of(ListCache).add_examples(10, 1)
    reporter.pytest_terminal_summary()
    assert "planted bugs" not in reporter.in_words(1)
    assert "some searches ended before they had tried all" in reporter.in_words(1)


def test_report_counts_skipped_examples(project: Project) -> None:
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
    options = ["--roseinfer-search-seconds=0.1", "--roseinfer-report=a.json"]
    result = project.pytest("-k", "histories", *options, "--roseinfer-report=a.html")
    line = "searched * of 100 examples in the time limit (--roseinfer-search-seconds): this is *"
    result.stdout.fnmatch_lines([line])
    (target,) = json.loads((project.path / "a.json").read_text())["targets"]
    assert target["cut_short"] in result.stdout.str()
    assert (target["examples"], target["left_out"] > 0) == (100, True)
    assert target["cut_short"] in (project.path / "a.html").read_text()
