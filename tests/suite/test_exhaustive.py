"""Every short history of a small cache is run, once, and finds by itself what is wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import Divergence, History, Oracle, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.prefixes import LookUp
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.suite import exhaustive
from pytest_roseinfer.suite.exhaustive import (
    WalkCounts,
    empty_histories,
    every_step,
    every_texts,
    walk,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from roseinfer.cli import main
from tests.capabilities.caches import (
    branching_text_caches,
    broken_text_caches,
    broken_window_caches,
    namespaced_caches,
)
from tests.capabilities.caches.adversaries import UploadsItsTableLate
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.window_cache import LazyCache, WindowCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

MANAGER = "pytest_roseinfer.targets.roseinfer_kv:GroupedManager"
KERNELS_OFF = {"triton": False}
LATER: dict[type[KVCacheAdapter], tuple[Operation, ...]] = {
    broken_text_caches.TakesWhatWasThere: (Prefill(0, 6), Free(0), LookUp(2, 4)),
    broken_text_caches.HitsDoNotRenew: (Prefill(0, 6), Free(0), Prefill(1, 6)),
    branching_text_caches.WritesUnderAKeptKey: (
        Prefill(0, 2),
        Prefill(1, 2),
        Truncate(0, 1),
        Free(1),
    ),
}
"""What is found at the fifth or sixth step, and not before: the steps from where to walk on."""
BROKEN = (
    broken_window_caches.FreesATokenEarly,
    broken_window_caches.SlidesTheFirstGroupOnly,
    *broken_text_caches.BROKEN,
    *branching_text_caches.BROKEN,
    *namespaced_caches.BROKEN,
)


def walk_all(
    adapter: type[KVCacheAdapter], most: int, steps: tuple[Operation, ...] = ()
) -> WalkCounts:
    walked = WalkCounts()
    options = KERNELS_OFF if "triton" in adapter.option_choices else {}
    for beginning in empty_histories(adapter, options):
        history = replace(beginning, operations=steps)
        assert all(each.size == most for each in walk(adapter, history, most, walked))
    return walked


@pytest.mark.many_alike
@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
def test_what_fits_the_bounds_is_found(cache: type[KVCacheAdapter]) -> None:
    steps = LATER.get(cache, ())
    with pytest.raises(Divergence):
        walk_all(cache, len(steps) + 2 if steps else 3, steps)


def test_what_only_an_unread_step_shows_is_found() -> None:
    steps = (Append((0,)),) * 3
    with pytest.raises(Divergence, match="gather: sequence 0"):
        walk_all(UploadsItsTableLate, 5, steps)


def test_each_history_is_run_once() -> None:
    run: list[Sequence[Operation]] = []
    walked = WalkCounts()
    for beginning in empty_histories(GroupedManager, KERNELS_OFF):
        run += [each.operations for each in walk(GroupedManager, beginning, 3, walked)]
    assert len(run) == len(set(run)) == 26
    assert walked.histories == 33
    assert len(walked.states) == 20


@pytest.mark.parametrize(
    "cache",
    [ListCache, BranchingTextCache, namespaced_caches.NamespacedCache, WindowCache, LazyCache],
)
def test_right_caches_pass(cache: type[KVCacheAdapter]) -> None:
    assert walk_all(cache, 2).histories


class FreesWhatNobodyHas(GroupedManager):
    """It accepts to free a sequence that never was."""

    def free(self, seq: int) -> None:
        if seq in self.lists:
            super().free(seq)


def test_bad_calls_are_made() -> None:
    with pytest.raises(Divergence, match="free of a sequence that never was went through"):
        walk_all(FreesWhatNobodyHas, 1)


def test_the_first_name_and_the_first_text_stand_for_all() -> None:
    assert every_step(GroupedManager, Oracle(2, 3)) == [Append((0,))]
    (same, *parting) = every_texts(BranchingTextCache)
    for texts in (same, *parting):
        steps = every_step(BranchingTextCache, Oracle(2, 3, branches=texts))
        assert steps == [Append((0,)), Prefill(0, 6), Prefill(0, 8)]


def test_a_name_that_was_used_is_not_taken_for_a_new_one() -> None:
    oracle = Oracle(2, 3)
    oracle.append([(0, 1)], [0])
    steps = [Append((0,)), Free(0), Truncate(0, 0), Append((1,)), Fork(0, 1)]
    assert {*every_step(GroupedManager, oracle)} == {*steps}
    oracle.free(0)
    assert every_step(GroupedManager, oracle) == [Append((0,)), Append((1,))]


def test_where_texts_part_either_can_be_said_again() -> None:
    oracle = Oracle(2, 3, branches=((0, 0), (0, 2)))
    oracle.append([(0, 1)], [0])
    oracle.free(0)
    begun = [step for step in every_step(BranchingTextCache, oracle) if isinstance(step, Append)]
    assert begun == [Append((2,)), Append((1,))]


def test_what_is_divided_among_processes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 2)
    with ThreadPoolExecutor(1) as pool:
        found = exhaustive.every_history(MANAGER, KERNELS_OFF, 3, pool)
    assert (found.walked.histories, len(found.walked.states), found.wrong) == (33, 20, "")


def test_it_says_how_far_it_has_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 2)
    monkeypatch.setattr(exhaustive, "_SAID_EVERY", 0.0)
    with ThreadPoolExecutor(1) as pool:
        exhaustive.every_history(MANAGER, KERNELS_OFF, 3, pool)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"{MANAGER}: {len(said)} of {len(said)} parts, 33 histories"


def test_a_process_that_finds_something_ends_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "_DIVIDED_AT", 1)
    with ThreadPoolExecutor(1) as pool:
        found = exhaustive.every_history(
            "tests.capabilities.caches.broken_text_caches:RevivesWithoutItsKey", {}, 3, pool
        )
    assert "after step 3 of" in found.wrong


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("list_cache:ListCache", 0, "histories, "),
        ("broken_text_caches:KnowsABareHash", 1, "wrong, found by "),
    ],
)
def test_it_says_how_many_histories_it_ran(
    name: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exhaustive.run([f"tests.capabilities.caches.{name}"], steps=2) == status
    told = capsys.readouterr().out
    assert told.startswith("every history of up to 2 steps, on 3 blocks of 2 tokens and 2 sequen")
    assert said in told


def test_verify_walks_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Sequence[str]] = []

    def run(targets: Sequence[str]) -> int:
        walked.append(targets)
        return 7

    monkeypatch.setattr(exhaustive, "run", run)
    assert main(["verify", "--exhaustive"]) == main(["verify", "--exhaustive", MANAGER]) == 7
    assert main(["verify", "--exhaustive", "--target", MANAGER]) == 7
    assert walked == [[], [MANAGER], [MANAGER]]


def test_all_that_is_shipped_can_be_walked() -> None:
    assert len(exhaustive.SHIPPED) == 3
    assert exhaustive.run((), steps=2) == 0


def test_an_empty_sequence_is_not_taken_for_one_with_blocks() -> None:
    """A bad call reads past the end of the newest sequence that has blocks; 1 has none here."""
    steps = (Append((0,)), Append((1,)), Truncate(1, 0))
    (beginning,) = empty_histories(GroupedManager, KERNELS_OFF)
    run_history(GroupedManager, History(beginning.spec, steps))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:Nothing", "there is no module nowhere"),
        ("json:JSONDecoder", "not a subclass of KVCacheAdapter or EngineAdapter"),
        (SHIPPED_TARGETS[0], "adapter of an engine; --exhaustive needs one of a cache"),
    ],
)
def test_a_name_that_leads_to_no_cache_is_no_history_gone_wrong(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--exhaustive", name]) == 4
    error = capsys.readouterr().err
    assert error.startswith("ERROR: ")
    assert said in error
