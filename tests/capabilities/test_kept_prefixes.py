"""Reused prefixes that stay as they are: copies of their blocks need room."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, KVCacheAdapter, run_history
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp, PrefixPages
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.texts import WHOLE
from tests.capabilities.caches.swap_cache import SwapCache
from tests.capabilities.caches.tail_cache import CountsNoCopy, DoesNotDeclareKeptPrefixes, TailCache
from tests.histories.drawn_histories import check_drawn_histories

TAIL_REUSED = (Prefill(0, 1), Free(0), LookUp(1, 1), BeginWith(1))
FULL = History(
    CacheSpec(block_size=2, num_blocks=2),
    (*TAIL_REUSED, Prefill(2, 1), Append((1,))),
    texts=((0, 0), (0, WHOLE), (0, 0)),
)
"""Sequence 1 begins with the partial block of sequence 0, and no block is left for a copy."""


def oracle_with_found_prefix(length: int = 6) -> Oracle:
    """Return an oracle of pages of 4 in which sequence 0 began with ``length`` found tokens."""
    prefix_pages = PrefixPages()
    oracle = Oracle(4, 9, states={PrefixPages: prefix_pages}, truncate_copies=True)
    oracle.append([(0, length)], oracle.new_tokens([(0, length)]))
    prefix_pages.begin(0, len(oracle.sequences[0]))
    return oracle


def test_append_to_a_found_prefix_needs_a_page() -> None:
    oracle = oracle_with_found_prefix()
    assert oracle.pages_needed([(0, 1)]) == 1
    oracle.capacity = 2
    assert not oracle.fits([(0, 1)])
    assert not oracle.block_counts().append(0, 1)
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == 0
    assert oracle.pages_needed([(0, 2)]) == 1


def test_each_sharer_of_a_found_prefix_needs_a_page() -> None:
    oracle = oracle_with_found_prefix()
    oracle.fork(0, 1)
    assert oracle.pages_needed([(0, 1), (1, 1)]) == 2
    oracle.free(0)
    assert oracle.pages_needed([(1, 1)]) == 1


def test_truncation_within_a_found_prefix_needs_a_page() -> None:
    oracle = oracle_with_found_prefix(length=8)
    oracle.capacity = 2
    assert oracle.truncations_fit([(0, 3)])  # the freed second page makes room
    assert not oracle.truncations_fit([(0, 6)])
    oracle.truncate(0, 3)
    assert oracle.pages_needed([(0, 1)]) == 0


def test_append_after_truncation_to_a_page_end_needs_no_copy() -> None:
    oracle = oracle_with_found_prefix()
    oracle.truncate(0, 4)
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == 0


def test_append_needs_no_copy_without_kept_prefixes() -> None:
    oracle = oracle_with_found_prefix()
    oracle.states.clear()
    assert oracle.pages_needed([(0, 1)]) == 0


@pytest.mark.parametrize("cache", [TailCache, SwapCache])
def test_shortcut_for_room_equals_the_count_of_blocks(cache: type[KVCacheAdapter]) -> None:
    """Room for rows is counted by a shortcut where no layer has a window."""
    outcomes = Counter[bool]()

    def compare(history: History) -> None:
        oracle = Oracle.of(cache, history.spec, history.texts)
        for step in history.operations:
            for count in (1, oracle.block_size, 2 * oracle.block_size + 1):
                rows = [(seq, count) for seq in oracle.sequences]
                blocks = oracle.block_counts()
                enough = [blocks.append(*row) for row in rows]
                assert oracle.fits(rows) is all(enough), (step, rows)
                outcomes[all(enough)] += bool(rows)
            assert oracle.pages_free() == oracle.block_counts().free[None]
            step.fill_in_numbers(oracle).apply(oracle)

    check_drawn_histories(cache, 60, 1, compare)
    assert min(outcomes[True], outcomes[False]) > 100, outcomes


def search(cache: type[TailCache], seed_number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


def test_cache_that_keeps_found_prefixes_passes() -> None:
    search(TailCache, 1, examples=30)
    run_history(TailCache, FULL)


def test_copy_without_room_must_be_refused() -> None:
    with pytest.raises(Divergence, match="refused a write that fits"):
        run_history(DoesNotDeclareKeptPrefixes, FULL)
    with pytest.raises(Divergence, match="pop from empty list"):
        run_history(CountsNoCopy, FULL)


def test_copy_with_room_is_accepted() -> None:
    larger = replace(FULL, spec=replace(FULL.spec, num_blocks=3))
    run_history(TailCache, larger)
    run_history(CountsNoCopy, larger)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
def test_uncounted_copy_fails(seed_number: int) -> None:
    with pytest.raises(Divergence, match="pop from empty list"):
        search(CountsNoCopy, seed_number, examples=300)
