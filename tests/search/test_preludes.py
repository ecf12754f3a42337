"""Searches aim at what was reached too rarely by what reached it."""

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
REACHED = History(CacheSpec(block_size=3, num_blocks=24), STEPS)


class Forks(ListCache):
    def fork(self, parent: int, child: int) -> None:
        self.rows[child] = list(self.rows[parent])


_Example = TypeVar("_Example", History, RequestMix)


def drawn(strategy: SearchStrategy[_Example]) -> list[_Example]:
    """Return what Hypothesis draws in 120 examples."""
    found: list[_Example] = []

    @seed(1)
    @hypothesis_settings(max_examples=120, database=None, phases=[Phase.generate], deadline=None)
    @given(strategy)
    def attempt(example: _Example) -> None:
        found.append(example)

    attempt()
    return found


def test_histories_begin_as_what_reached_it_and_go_on_in_their_own_way() -> None:
    every = drawn(histories(Forks, preludes=[REACHED]))
    again = [each for each in every if each.operations[:2] == STEPS[:2]]
    assert 20 < len(again) < len(every)
    assert all(each.spec == REACHED.spec for each in again)
    whole = [each for each in again if each.operations[:3] == STEPS]
    assert 10 < len(whole) < len(again)
    assert len({each.operations for each in again}) > len(again) / 3


def test_histories_of_few_kinds_of_steps() -> None:
    def kinds(*, few: bool) -> float:
        every = drawn(histories(GroupedManager, preludes=[REACHED], few_kinds=few))
        of_each = [len({*map(type, each.operations[3:])}) for each in every if each.size > 8]
        return sum(of_each) / len(of_each)

    assert kinds(few=True) < 0.8 * kinds(few=False)


def test_mixes_are_what_reached_it_and_one_request_more() -> None:
    reached = RequestMix(
        (RequestSpec((1, 2, 3)), RequestSpec((2,), arrival=1)), block_size=3, cache_tokens=9
    )
    every = drawn(request_mixes(ToyAdapter, preludes=[reached]))
    again = [each for each in every if each.requests[:2] == reached.requests]
    assert 20 < len(again) < len(every)
    assert {(len(each.requests), each.block_size) for each in again} == {(3, 3)}
    assert all(each.cache_tokens >= each.requests[2].most_tokens for each in again)


def test_examples_are_kept_by_what_they_reached_while_that_is_short() -> None:
    short = ["fast", "rare", "never"]
    preludes = Preludes[History](lambda: short, ["fast", "never"])
    for _ in range(20):
        preludes.note(["fast", "often"], lambda: REACHED)
    preludes.note(["rare"], lambda: REACHED)
    assert preludes.of("fast") == (REACHED,) * 8
    assert preludes.of("never") == ()
    assert preludes.of(None) == (REACHED,)
    short.remove("fast")
    assert preludes.of("fast") == ()


class RarelyFast(ListCache):
    """Takes its fast path once from its 40th history on, and whenever the same is done again."""

    paths: ClassVar[Mapping[str, FastPath]] = {"fast": FastPath("slow")}
    seen: ClassVar[Counter[str]] = Counter()
    marked: ClassVar[set[str]] = set()

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.done, self.counts = str(spec), Counter[str]()
        self.seen["made"] += 1

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        self.done += f" {seqs}"
        if not self.marked and self.seen["made"] >= 40 and len(self.done) > 200:
            self.marked.add(self.done)
        self.counts["fast" if self.done in self.marked else "slow"] += 1


@pytest.fixture
def _fresh() -> None:
    RarelyFast.seen.clear()
    RarelyFast.marked.clear()


@pytest.mark.usefixtures("_fresh")
def test_what_was_reached_once_is_reached_again() -> None:
    with fresh_run(settings.Settings(examples=80, seed=1)):
        conformance(RarelyFast)().test_histories()
        target = coverage.current().of(RarelyFast)
        (row,) = TargetVerdict(target).rows()
    assert len(RarelyFast.marked) == 1
    assert (row.verdict, TargetVerdict(target).warnings()) == ("equal", [])


class NeverFast(RarelyFast):
    marked: ClassVar[set[str]] = {"no history"}


@pytest.mark.takes_long
def test_a_path_that_is_never_taken_fails_a_run_of_a_hundred_examples() -> None:
    with fresh_run(settings.Settings(examples=100, steps=3, seed=1)):
        conformance(NeverFast)().test_histories()
        (problem,) = TargetVerdict(coverage.current().of(NeverFast)).problems(require_paths=True)
    assert problem.startswith("path 'fast' was never reached, by none of 1000 histories")
