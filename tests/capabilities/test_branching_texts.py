"""Texts that branch by forks and truncation: caches that mix branches up fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from tests.capabilities.caches.branching_text_caches import (
    RIGHT,
    KeepsKeysOfTruncatedBlocks,
    RegistersTheParentsText,
    WritesUnderAKeptKey,
)

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(block_size=2, num_blocks=4)
CUT = History(SPEC, (Prefill(0, 2), Truncate(0, 1), Append((0,))), texts=((0, 0),))


def search(cache: type[KVCacheAdapter], seed_number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


def search_in_dev_rounds(cache: type[KVCacheAdapter], seed_number: int) -> None:
    for turn_index in range(8):
        search(cache, 8 * seed_number + turn_index, examples=12)


@pytest.mark.parametrize("cache", RIGHT)
def test_cache_that_separates_branches_passes(cache: type[KVCacheAdapter]) -> None:
    search(cache, 1, examples=40)
    run_history(cache, CUT)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
def test_block_registered_under_the_parents_text_fails(seed_number: int) -> None:
    with pytest.raises(Divergence):
        search(RegistersTheParentsText, seed_number, examples=200)


@pytest.mark.slow
def test_block_written_under_a_stale_key_fails_with_nine_of_ten_seeds() -> None:
    found = 0
    for seed_number in range(10):
        try:
            search_in_dev_rounds(WritesUnderAKeptKey, seed_number)
        except Divergence:
            found += 1
    assert found >= 9


def test_truncated_block_found_by_its_old_text_fails() -> None:
    message = r"match_prefix\(\) of text 0, 2 tokens long, found 2, and"
    with pytest.raises(Divergence, match=message) as failure:
        run_history(KeepsKeysOfTruncatedBlocks, CUT)
    assert "page by page (t and text.token, x holders where shared):" in str(failure.value)


@pytest.mark.parametrize("cache", RIGHT)
def test_tokens_truncated_by_one_holder_can_be_found_while_stored(
    cache: type[KVCacheAdapter],
) -> None:
    """A shared block that stays shared can be found while only the truncated sequence holds it."""
    steps = (Prefill(0, 2), Fork(0, 1), Truncate(0, 1), Free(1), Prefill(2, 2), Append((0,)))
    run_history(cache, History(SPEC, steps, texts=((0, 0),)))
