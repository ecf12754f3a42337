"""Preludes: searches for a rarely reached path begin like the examples that reached it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    FastPath,
    History,
    RequestMix,
    RequestSpec,
    conformance,
    settings,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.coverage import Preludes
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.list_cache import ListCache
from tests.engine_capabilities.engines.toy_engine import ToyAdapter
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from hypothesis.strategies import SearchStrategy

STEPS = (Append((0, 1, 2)), Fork(1, 3), Append((3, 0)))
REACHING_HISTORY = History(CacheSpec(block_size=3, num_blocks=24), STEPS)


class Forks(ListCache):
    def fork(self, parent: int, child: int) -> None:
        self.rows[child] = list(self.rows[parent])


_Example = TypeVar("_Example", History, RequestMix)


def draw_examples(strategy: SearchStrategy[_Example]) -> list[_Example]:
    """Return the examples that Hypothesis draws in 120 attempts."""
    examples: list[_Example] = []

    @seed(1)
    @hypothesis_settings(max_examples=120, database=None, phases=[Phase.generate], deadline=None)
    @given(strategy)
    def attempt(example: _Example) -> None:
        examples.append(example)

    attempt()
    return examples


@pytest.mark.slow
def test_histories_begin_with_a_prelude_and_continue_differently() -> None:
    drawn = draw_examples(histories(Forks, preludes=[REACHING_HISTORY]))
    begun_alike = [each for each in drawn if each.operations[:2] == STEPS[:2]]
    assert 20 < len(begun_alike) < len(drawn)
    assert all(each.spec == REACHING_HISTORY.spec for each in begun_alike)
    with_all_steps = [each for each in begun_alike if each.operations[:3] == STEPS]
    assert 10 < len(with_all_steps) < len(begun_alike)
    assert len({each.operations for each in begun_alike}) > len(begun_alike) / 3


@pytest.mark.slow
def test_few_kinds_reduces_the_kinds_of_steps() -> None:
    def kinds(*, few_kinds: bool) -> float:
        drawn = draw_examples(
            histories(GroupedManager, preludes=[REACHING_HISTORY], few_kinds=few_kinds)
        )
        counts_of_kinds = [
            len({*map(type, each.operations[3:])}) for each in drawn if each.size > 8
        ]
        return sum(counts_of_kinds) / len(counts_of_kinds)

    assert kinds(few_kinds=True) < 0.8 * kinds(few_kinds=False)


def test_mixes_are_a_prelude_and_one_more_request() -> None:
    reaching_mix = RequestMix(
        (RequestSpec((1, 2, 3)), RequestSpec((2,), arrival=1)), block_size=3, cache_tokens=9
    )
    drawn = draw_examples(request_mixes(ToyAdapter, preludes=[reaching_mix]))
    begun_alike = [each for each in drawn if each.requests[:2] == reaching_mix.requests]
    assert 20 < len(begun_alike) < len(drawn)
    assert {(len(each.requests), each.block_size) for each in begun_alike} == {(3, 3)}
    assert all(each.cache_tokens >= each.requests[2].max_tokens for each in begun_alike)


def test_preludes_are_stored_by_their_missing_paths() -> None:
    missing = ["fast", "rare", "never"]
    preludes = Preludes[History](lambda: missing, ["fast", "never"])
    for _ in range(20):
        preludes.note(["fast", "often"], lambda: REACHING_HISTORY)
    preludes.note(["rare"], lambda: REACHING_HISTORY)
    assert preludes.of("fast") == (REACHING_HISTORY,) * 8
    assert preludes.of("never") == ()
    assert preludes.of(None) == (REACHING_HISTORY,)
    missing.remove("fast")
    assert preludes.of("fast") == ()


class RarelyFast(ListCache):
    """Takes its fast path in one history from the 40th on, and in every repetition of it."""

    paths: ClassVar[Mapping[str, FastPath]] = {"fast": FastPath("slow")}
    counters: ClassVar[Counter[str]] = Counter()
    fast_histories: ClassVar[set[str]] = set()

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.steps_done, self.counts = str(spec), Counter[str]()
        self.counters["made"] += 1

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        self.steps_done += f" {seqs}"
        if not self.fast_histories and self.counters["made"] >= 40 and len(self.steps_done) > 200:
            self.fast_histories.add(self.steps_done)
        self.counts["fast" if self.steps_done in self.fast_histories else "slow"] += 1


@pytest.fixture
def _cleared_counters() -> None:
    RarelyFast.counters.clear()
    RarelyFast.fast_histories.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_cleared_counters")
def test_path_reached_once_is_reached_again() -> None:
    with fresh_run(settings.Settings(examples=80, seed=1)):
        conformance(RarelyFast)().test_histories()
        target = coverage.current().of(RarelyFast)
        (row,) = TargetVerdict(target).rows()
    assert len(RarelyFast.fast_histories) == 1
    assert (row.verdict, TargetVerdict(target).warnings()) == ("equal", [])


class NeverFast(RarelyFast):
    fast_histories: ClassVar[set[str]] = {"no history"}


@pytest.mark.slow
def test_unreached_path_fails_a_run_of_a_hundred_examples() -> None:
    with fresh_run(settings.Settings(examples=100, steps=3, seed=1)):
        conformance(NeverFast)().test_histories()
        (problem,) = TargetVerdict(coverage.current().of(NeverFast)).problems(require_paths=True)
    assert problem.startswith("path 'fast' was never reached, by none of 1000 histories")
