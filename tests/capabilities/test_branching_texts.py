"""Texts branch where sequences fork and are cut, and caches that lose track of it are found."""

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
    KeepsTheKeyOfWhatWasCut,
    RegistersTheParentsText,
    WritesUnderAKeptKey,
)

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(block_size=2, num_blocks=4)
CUT = History(SPEC, (Prefill(0, 2), Truncate(0, 1), Append((0,))), texts=((0, 0),))


def search(cache: type[KVCacheAdapter], number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(number)
    @given(histories(cache))
    def look(history: History) -> None:
        run_history(cache, history)

    look()


def search_as_dev(cache: type[KVCacheAdapter], number: int) -> None:
    for turn in range(8):
        search(cache, 8 * number + turn, examples=12)


@pytest.mark.parametrize("cache", RIGHT)
def test_one_that_keeps_branches_apart_passes(cache: type[KVCacheAdapter]) -> None:
    search(cache, 1, examples=40)
    run_history(cache, CUT)


@pytest.mark.parametrize("number", range(3))
def test_a_block_under_the_parents_text_is_found(number: int) -> None:
    with pytest.raises(Divergence):
        search(RegistersTheParentsText, number, examples=200)


@pytest.mark.parametrize("number", range(3))
def test_a_block_under_the_key_of_who_let_go_of_it_is_found(number: int) -> None:
    with pytest.raises(Divergence):
        search_as_dev(WritesUnderAKeptKey, number)


def test_a_cut_block_under_its_old_text_is_found() -> None:
    said = r"match_prefix\(\) of text 0, 2 tokens long, found 2, and"
    with pytest.raises(Divergence, match=said) as found:
        run_history(KeepsTheKeyOfWhatWasCut, CUT)
    assert "page by page (t and text.token, x holders where shared):" in str(found.value)


@pytest.mark.parametrize("cache", RIGHT)
def test_what_one_does_not_see_can_be_found_as_long_as_it_is_there(
    cache: type[KVCacheAdapter],
) -> None:
    """Where a shared block stays shared, it stays known when only who was cut still holds it."""
    steps = (Prefill(0, 2), Fork(0, 1), Truncate(0, 1), Free(1), Prefill(2, 2), Append((0,)))
    run_history(cache, History(SPEC, steps, texts=((0, 0),)))
