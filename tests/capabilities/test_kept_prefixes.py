"""What sequences began with stays as it is where a cache says so, and copies of it need room."""

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
from tests.capabilities.caches.tail_cache import CountsNoCopy, SaysNothingOfIt, TailCache
from tests.histories.drawn import drawn

TAIL_TAKEN = (Prefill(0, 1), Free(0), LookUp(1, 1), BeginWith(1))
FULL = History(
    CacheSpec(block_size=2, num_blocks=2),
    (*TAIL_TAKEN, Prefill(2, 1), Append((1,))),
    texts=((0, 0), (0, WHOLE), (0, 0)),
)
"""The tail of sequence 0 is sequence 1's, and nothing is left for a copy of it."""


def taken(length: int = 6) -> Oracle:
    """Return an oracle of pages of 4 in which sequence 0 began with so many tokens."""
    found = PrefixPages()
    oracle = Oracle(4, 9, states={PrefixPages: found}, truncate_copies=True)
    oracle.append([(0, length)], oracle.new_tokens([(0, length)]))
    found.begin(0, len(oracle.sequences[0]))
    return oracle


def test_who_appends_to_what_was_found_needs_a_page() -> None:
    oracle = taken()
    assert oracle.pages_needed([(0, 1)]) == 1
    oracle.capacity = 2
    assert not oracle.fits([(0, 1)])
    assert not oracle.block_counts().append(0, 1)
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == 0
    assert oracle.pages_needed([(0, 2)]) == 1


def test_all_who_share_what_was_found_need_a_page() -> None:
    oracle = taken()
    oracle.fork(0, 1)
    assert oracle.pages_needed([(0, 1), (1, 1)]) == 2
    oracle.free(0)
    assert oracle.pages_needed([(1, 1)]) == 1


def test_who_cuts_what_was_found_needs_a_page() -> None:
    oracle = taken(length=8)
    oracle.capacity = 2
    assert oracle.truncations_fit([(0, 3)])  # the page behind it makes room
    assert not oracle.truncations_fit([(0, 6)])
    oracle.truncate(0, 3)
    assert oracle.pages_needed([(0, 1)]) == 0


def test_who_was_cut_to_the_end_of_a_page_begins_one_of_its_own() -> None:
    oracle = taken()
    oracle.truncate(0, 4)
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == 0


def test_nothing_is_copied_where_nothing_is_kept() -> None:
    oracle = taken()
    oracle.states.clear()
    assert oracle.pages_needed([(0, 1)]) == 0


@pytest.mark.parametrize("cache", [TailCache, SwapCache])
def test_room_without_windows_is_as_counted_block_by_block(cache: type[KVCacheAdapter]) -> None:
    """Room for rows is counted in a quicker way where no layer has a window."""
    seen = Counter[bool]()

    def compare(history: History) -> None:
        oracle = Oracle.of(cache, history.spec, history.texts)
        for step in history.operations:
            for count in (1, oracle.block_size, 2 * oracle.block_size + 1):
                rows = [(seq, count) for seq in oracle.sequences]
                blocks = oracle.block_counts()
                enough = [blocks.append(*row) for row in rows]
                assert oracle.fits(rows) is all(enough), (step, rows)
                seen[all(enough)] += bool(rows)
            assert oracle.pages_free() == oracle.block_counts().free[None]
            step.fill_in_numbers(oracle).apply(oracle)

    drawn(cache, 60, 1, compare)
    assert min(seen[True], seen[False]) > 100, seen


def search(cache: type[TailCache], number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(number)
    @given(histories(cache))
    def look(history: History) -> None:
        run_history(cache, history)

    look()


def test_a_cache_that_keeps_what_was_found_passes() -> None:
    search(TailCache, 1, examples=30)
    run_history(TailCache, FULL)


def test_a_copy_for_which_there_is_no_room_is_refused() -> None:
    with pytest.raises(Divergence, match="refused a write that fits"):
        run_history(SaysNothingOfIt, FULL)
    with pytest.raises(Divergence, match="pop from empty list"):
        run_history(CountsNoCopy, FULL)


def test_there_is_room_for_a_copy() -> None:
    larger = replace(FULL, spec=replace(FULL.spec, num_blocks=3))
    run_history(TailCache, larger)
    run_history(CountsNoCopy, larger)


@pytest.mark.parametrize("number", range(3))
def test_a_copy_that_is_not_counted_is_found(number: int) -> None:
    with pytest.raises(Divergence, match="pop from empty list"):
        search(CountsNoCopy, number, examples=300)
