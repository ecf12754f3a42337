"""Texts of which one call stores or cuts several: refused calls must change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.truncation import Truncate, TruncateMany
from pytest_roseinfer.capabilities.writes import Append, AppendMany, Prefill
from pytest_roseinfer.run.metamorphic import check_permuted, check_split
from tests.capabilities.caches.cut_text_caches import (
    BROKEN,
    RIGHT,
    CutTextCache,
    EvictsBeforeARefusal,
)
from tests.capabilities.test_branching_texts import search, search_in_dev_rounds

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(block_size=2, num_blocks=3)
ONE_TEXT = ((0, 0),)
REFUSED_APPEND = (Prefill(0, 2), Free(0), AppendMany((1,), (8,)))
SHARED = (Prefill(0, 4), Fork(0, 1), Truncate(1, 2), Prefill(2, 2))
CUT_BEFORE_ROOM = TruncateMany((1, 0), (1, 2))
ROOM_BEFORE_CUT = TruncateMany((0, 1), (2, 1))


@pytest.mark.parametrize("cache", RIGHT)
def test_cache_that_cuts_several_texts_passes(cache: type[KVCacheAdapter]) -> None:
    search(cache, 1, examples=40)
    run_history(cache, History(SPEC, REFUSED_APPEND, texts=ONE_TEXT))
    run_history(cache, History(SPEC, (*SHARED, CUT_BEFORE_ROOM), texts=((0, 0),) * 3))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", BROKEN, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("seed_number", range(3))
def test_broken_cache_fails(cache: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        search_in_dev_rounds(cache, seed_number)


def test_eviction_by_a_refused_step_fails() -> None:
    message = "block 0 was evicted, by a step that was refused, which must change nothing"
    with pytest.raises(Divergence, match=message):
        run_history(EvictsBeforeARefusal, History(SPEC, REFUSED_APPEND, texts=ONE_TEXT))


@pytest.mark.parametrize("check", [check_permuted, check_split])
def test_new_texts_do_not_depend_on_the_order_of_rows(check: object) -> None:
    """Sequences that are cut in one call write the same tokens after it, whatever their order."""
    assert callable(check)
    steps = (Append((1, 0)), TruncateMany((1, 0), (0, 0)), Append((1,)), Append((0,)))
    check(CutTextCache, History(SPEC, steps, texts=ONE_TEXT))
