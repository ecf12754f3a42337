"""Batch kinds: every cache gets batches of each kind that it can have, and they are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, settings
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES
from pytest_roseinfer.capabilities.writes import (
    BOUNDARY,
    LAST_SHARED,
    MIXED_LENGTHS,
    MIXED_POSITIONS,
    ONE_POSITION,
    SHARED_TWICE,
    Append,
    BatchKinds,
    batch_kinds,
)
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from pytest_roseinfer.suite.large_search import LargeHistories
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, WindowedManager
from tests.capabilities.caches.branching_text_caches import BranchingTextCache
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.namespaced_caches import NamespacedCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.swap_cache import SwapCache
from tests.capabilities.caches.tail_cache import TailCache
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.windowed_text_cache import WindowedTextCache
from tests.mutants.prefix_cached_manager import PrefixCachedManager, WindowedPrefixes
from tests.tutorials import paged_kv
from tests.tutorials.printed import harness_on

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

TUTORIAL: type[KVCacheAdapter] = type(harness_on(paged_kv)).adapter
QUICK = (
    *(TextCache, BranchingTextCache, TailCache, WindowedTextCache, NamespacedCache),
    *(SwapCache, PagedCache, ListCache, PrefixCachedManager, WindowedPrefixes, TUTORIAL),
)
SLOW = (GroupedManager, WindowedManager)
MIN_COUNT = 40


class ChecksTheEndsOnly(TextCache):
    """Writes all rows to the first row's position, if the last row has that position too."""

    common: int | None = None

    def append(self, seqs, key, value):  # type: ignore[no-untyped-def]
        first, last = self.position(seqs[0]), self.position(seqs[-1])
        self.common = first if first == last else None
        try:
            super().append(seqs, key, value)
        finally:
            self.common = None

    def position(self, seq: int) -> int:
        return super().position(seq) if self.common is None else self.common


@pytest.fixture
def only_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out large histories, whose batches are not counted."""
    monkeypatch.setattr(LargeHistories, "run", lambda *_: None)


def kinds_of_batch(lengths: list[int], size: int = 4, forks: int = 0) -> set[str]:
    """Return the kinds of a batch of sequences of these lengths, the first of which has forks.

    The forks are not in the batch.
    """
    oracle = Oracle(size, 99)
    for seq, length in enumerate(lengths):
        rows = [(seq, length)] * bool(length)
        oracle.append(rows, oracle.new_tokens(rows))
    for child in range(forks):
        oracle.fork(0, 90 + child)
    return {*batch_kinds(oracle, [(seq, 1) for seq in range(len(lengths))])}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (kinds_of_batch([1, 1, 1]), {ONE_POSITION}),
        (kinds_of_batch([0, 0, 0]), {ONE_POSITION}),
        (kinds_of_batch([1, 5, 1]), {ONE_POSITION, MIXED_LENGTHS}),
        (kinds_of_batch([1, 6, 1]), {MIXED_POSITIONS, MIXED_LENGTHS}),
        (kinds_of_batch([3, 3, 3]), {ONE_POSITION, BOUNDARY}),
        (kinds_of_batch([1, 4, 1]), {MIXED_POSITIONS, MIXED_LENGTHS, BOUNDARY}),
        (kinds_of_batch([1, 1, 2], size=1), {MIXED_LENGTHS, BOUNDARY}),
        (kinds_of_batch([1, 1, 1], forks=1), {ONE_POSITION, SHARED_TWICE, LAST_SHARED}),
        (kinds_of_batch([1, 1, 1], forks=2), {ONE_POSITION}),
    ],
)
def test_kinds_of_a_batch_follow_from_its_rows(kinds: set[str], expected: set[str]) -> None:
    assert kinds == expected


def test_row_with_a_new_block_still_shares_earlier_blocks() -> None:
    oracle = Oracle(4, 99)
    for rows in [(0, 4)], [(1, 1)], [(2, 1)]:
        oracle.append(rows, oracle.new_tokens(rows))
    oracle.fork(0, 3)
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    kinds = {*batch_kinds(oracle, [(seq, 1) for seq in (0, 1, 2)])}
    assert kinds == {ONE_POSITION, MIXED_LENGTHS, SHARED_TWICE}


def test_batches_of_two_rows_are_not_counted() -> None:
    steps = (Append((0, 1)), Append((0, 1, 2)), Append((0, 1, 2)))
    machine = HistoryRunner(ListCache, History(CacheSpec(block_size=4), steps))
    assert len([*machine.steps()]) == len(steps)
    batches = machine.observer(BatchKinds)
    assert batches
    assert batches.counts == {MIXED_LENGTHS: 2, MIXED_POSITIONS: 2}


@pytest.mark.parametrize(
    ("adapter", "impossible"),
    [
        (BranchingTextCache, set()),
        (TextCache, {LAST_SHARED}),
        (PagedCache, {SHARED_TWICE, LAST_SHARED}),
        (type("Forks", (SwapCache,), {"fork_shares": "full blocks"}), {LAST_SHARED}),
        (type("Forks", (SwapCache,), {"fork_shares": "nothing"}), {SHARED_TWICE, LAST_SHARED}),
        (type("Forks", (SwapCache,), {"block_sizes": (1,)}), {ONE_POSITION, MIXED_POSITIONS}),
    ],
)
def test_possible_batch_kinds_follow_from_the_adapter(
    adapter: type[KVCacheAdapter], impossible: set[str]
) -> None:
    all_kinds = {MIXED_LENGTHS, ONE_POSITION, MIXED_POSITIONS, BOUNDARY, SHARED_TWICE, LAST_SHARED}
    assert {*coverage.possible_batches(adapter)} == all_kinds - impossible


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", [BranchingTextCache, SwapCache, PagedCache])
def test_batch_histories_keep_to_the_limit_of_sequences(adapter: type[KVCacheAdapter]) -> None:
    most_sequences = 0

    @hypothesis_settings(max_examples=20, database=None, phases=[Phase.generate], deadline=None)
    @hypothesis_seed(1)
    @given(histories(adapter, in_batches=True))
    def record(history: History) -> None:
        nonlocal most_sequences
        machine = HistoryRunner(adapter, history)
        for _ in machine.steps():
            most_sequences = max(most_sequences, len(machine.oracle.sequences))

    record()
    assert 3 < most_sequences <= MAX_SEQUENCES


@pytest.mark.slow
@pytest.mark.usefixtures("short_run", "only_drawn")
@pytest.mark.parametrize(
    ("adapter", "seed"),
    [
        *((adapter, 1) for adapter in QUICK),
        *(pytest.param(adapter, 2, marks=pytest.mark.slow) for adapter in QUICK),
        *(pytest.param(adapter, 1, marks=pytest.mark.slow) for adapter in SLOW),
    ],
)
def test_each_batch_kind_is_drawn_often(adapter: type[KVCacheAdapter], seed: int) -> None:
    settings.set_current(settings.Settings(seed=seed, failures_dir=None))
    tests: Any = conformance(adapter)()
    tests.test_histories()
    batches = coverage.current().of(adapter).batches
    assert {kind: count for kind, count in batches.items() if count < MIN_COUNT} == {}
    assert {*batches} == {*coverage.possible_batches(adapter)}


@pytest.mark.slow
@pytest.mark.usefixtures("short_run", "only_drawn")
@pytest.mark.parametrize("seed", range(1, 4))
def test_check_of_only_the_first_and_last_row_is_found(seed: int) -> None:
    settings.set_current(settings.Settings(seed=seed, failures_dir=None))
    with pytest.raises(Divergence):
        conformance(ChecksTheEndsOnly)().test_histories()
