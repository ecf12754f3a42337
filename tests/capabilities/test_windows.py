"""Windows: caches that free or keep the wrong tokens fail."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings
from transformers.cache_utils import DynamicSlidingWindowLayer

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    Tolerance,
    WindowTraits,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.observation import Location, Snapshot
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Fill, Prefill, Reserve
from pytest_roseinfer.findings.divergence import picture
from pytest_roseinfer.histories.large import large_histories
from pytest_roseinfer.histories.strategies import layer_windows
from pytest_roseinfer.oracle.pages import Windows, first_live
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from pytest_roseinfer.search.shrink import smaller_caches
from pytest_roseinfer.suite.exhaustive import empty_histories
from tests.capabilities.caches.broken_window_caches import (
    BROKEN,
    AttendsToATokenTooMany,
    TruncatesIntoFreedBlocks,
)
from tests.capabilities.caches.broken_windowed_text_caches import BROKEN as BROKEN_WITH_TEXTS
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.ring_caches import BROKEN as BROKEN_RINGS
from tests.capabilities.caches.ring_caches import RingCache
from tests.capabilities.caches.window_cache import RIGHT, FixedWindowCache, LazyCache, WindowCache
from tests.capabilities.caches.windowed_text_cache import WindowedTextCache
from tests.capabilities.test_truncation import short_run as short_run
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer import KVCacheAdapter


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", [1, 2])
@pytest.mark.parametrize("adapter", [*BROKEN, *BROKEN_WITH_TEXTS, *BROKEN_RINGS])
def test_broken_windowed_cache_fails(adapter: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(adapter, 200, seed_number, partial(run_history, adapter))


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("adapter", [*RIGHT, FixedWindowCache])
def test_right_windowed_cache_passes(adapter: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=8, steps=12, seed=1))
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_fork_then_append_equals_copy_then_append()
    (row,) = TargetVerdict(coverage.current().of(adapter)).rows()
    assert (row.name, row.verdict) == ("block_left_window", "met")


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_cache_with_prefix_reuse_in_every_window_passes() -> None:
    tests = conformance(WindowedTextCache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@pytest.mark.sampled_cases
def test_cache_with_rings_outside_the_prefix_cache_passes() -> None:
    check_drawn_histories(RingCache, 100, 1, partial(run_history, RingCache))


def test_text_is_found_where_every_window_has_its_live_tokens() -> None:
    """A window of 3 needs only the last two of 6 tokens, in blocks of 2."""
    spec = CacheSpec(num_layers=2, block_size=2, num_blocks=16, windows=(3, None))
    steps = (Prefill(0, 6), Append((0,)), Prefill(2, 7), Append((2,)))
    history = History(spec, steps, texts=((0, 0), (0, 4)))
    run_history(WindowedTextCache, history)
    machine = HistoryRunner(WindowedTextCache, history)
    machine.run()
    tables = [machine.snapshot.tables_of(layer)[2] for layer in (0, 1)]
    assert [[block is None for block in table] for table in tables] == [
        [True, True, False, False],
        [False] * 4,
    ]
    assert machine.oracle.block_counts().free == {None: 16 - (4 + 1) - (2 + 1)}


# ---------------------------------------------------------------------------- live tokens


def test_live_tokens_equal_those_of_transformers() -> None:
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    for length in range(1, 8):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        assert length - first_live(4, length) == layer.keys.shape[2]


def test_first_live_token_equals_that_of_vllm() -> None:
    """In vLLM's own example, a window of 4 skips the first 4 of 7 computed tokens."""
    assert first_live(4, 7) == 4
    assert [first_live(window, 3) for window in (None, 1, 2, 3, 4, 5)] == [0, 3, 2, 1, 0, 0]


def oracle_with_windows(*windows: int | None, capacity: int = 8, **declared: Any) -> Oracle:
    """Return an oracle of a cache with blocks of two tokens."""
    of_windows = {name: declared.pop(name) for name in ("shared_pool", "frees") & declared.keys()}
    return Oracle(2, capacity, windows=Windows(windows, **of_windows), **declared)


def count_freed(oracle: Oracle, seq: int = 0) -> list[int]:
    return [oracle.count_out_of_window(seq, layer) for layer in range(len(oracle.windows.of_layer))]


def write(oracle: Oracle, seq: int, count: int) -> bool:
    """Append ``count`` tokens if there is room."""
    rows = [(seq, count)]
    fits = oracle.fits(rows)
    if fits:
        oracle.append(rows, oracle.new_tokens(rows))
    return fits


def test_each_group_frees_blocks_out_of_its_window() -> None:
    oracle = oracle_with_windows(1, 2, 3, None)
    write(oracle, 0, 5)
    assert count_freed(oracle) == [2, 2, 1, 0]
    assert [len(oracle.live(0, layer)) for layer in range(4)] == [0, 1, 2, 5]


def test_blocks_freed_by_the_next_write_make_room_for_it() -> None:
    oracle = oracle_with_windows(2, capacity=3, frees="next write")
    write(oracle, 0, 6)
    assert (count_freed(oracle), oracle.pages_free()) == ([0], 0)
    assert oracle.fits([(0, 1), (1, 1)])
    assert not oracle.fits([(1, 1), (0, 1)]), "expected no room from the block a later row frees"
    write(oracle, 0, 1)
    assert (count_freed(oracle), oracle.pages_free()) == ([2], 1)


def test_blocks_freed_at_once_make_room_for_later_writes_only() -> None:
    oracle = oracle_with_windows(2, capacity=3)
    assert not write(oracle, 0, 7), "expected all blocks to be taken before any is freed"
    assert write(oracle, 0, 6)
    assert (count_freed(oracle), oracle.pages_free()) == ([2], 2)


def test_groups_have_own_pools_or_share_one() -> None:
    for shared, free in ((False, {2: 7, None: 5}), (True, {None: 4})):
        oracle = oracle_with_windows(2, None, shared_pool=shared)
        write(oracle, 0, 5)
        assert oracle.block_counts().free == free
        assert write(oracle, 1, 6) is not shared
    assert oracle.describe_free_blocks([(1, 6)]) == "4 blocks free for all windows"


def test_reserved_blocks_are_held_until_written() -> None:
    oracle = oracle_with_windows(2)
    Reserve((0,), (6,)).apply(oracle)
    assert count_freed(oracle) == [0]
    Fill().apply(oracle)
    assert count_freed(oracle) == [2]


def test_fork_shares_live_pages_and_frees_them_by_its_own_window() -> None:
    oracle = oracle_with_windows(3)
    write(oracle, 0, 5)
    oracle.fork(0, 1)
    assert (count_freed(oracle, 1), oracle.pages_free()) == ([1], 6)
    write(oracle, 1, 1)
    assert oracle.pages_free() == 5, "expected a copy of the last page"
    write(oracle, 1, 2)
    assert (count_freed(oracle), count_freed(oracle, 1)) == ([1], [3])
    assert oracle.pages_free() == 5, "expected two pages of sequence 0 and one of sequence 1"
    oracle.free(0)
    assert oracle.pages_free() == 7


def test_page_freed_by_one_sequence_is_written_in_place_by_the_other() -> None:
    oracle = oracle_with_windows(2, None)
    write(oracle, 0, 2)
    oracle.fork(0, 1)
    oracle.truncate(1, 1)
    write(oracle, 0, 2)
    before = oracle.block_counts().free
    write(oracle, 1, 1)
    after = oracle.block_counts().free
    assert {window: before[window] - after[window] for window in before} == {2: 0, None: 1}


@pytest.mark.parametrize("capacity", [3, 4])
def test_truncation_copies_a_block_only_in_groups_that_share_it(capacity: int) -> None:
    oracle = oracle_with_windows(2, None, capacity=capacity, truncate_copies=True)
    write(oracle, 0, 4)
    oracle.fork(0, 1)
    write(oracle, 0, 2)
    assert oracle.block_counts().free == {2: capacity - 2, None: capacity - 3}
    assert oracle.truncations_fit([(1, 3)]) is (capacity == 4)
    oracle.truncate(1, 3)
    assert oracle.block_counts().free == {2: capacity - 2, None: capacity - 4}


def test_fork_that_shares_nothing_copies_live_blocks() -> None:
    for windows, fits in (((3,), True), ((3, None), False)):
        oracle = oracle_with_windows(*windows, capacity=4, fork_shares="nothing")
        write(oracle, 0, 5)
        assert oracle.fork_fits(0) is fits


# ------------------------------------------------------------------------- whole histories


def test_windows_are_drawn_around_block_edges_and_mixed() -> None:
    offsets: set[int] = set()
    groups: set[int] = set()
    has_full_attention: set[bool] = set()

    @seed(1)
    @hypothesis_settings(max_examples=80, deadline=None, database=None, phases=[Phase.generate])
    @given(layer_windows(4, block_size=4, groups=3))
    def record(windows: tuple[int | None, ...]) -> None:
        assert len(windows) == 4
        offsets.update(each - 4 for each in windows if each)
        groups.add(len({*windows}))
        has_full_attention.add(None in windows)

    record()
    assert {-1, 0, 1} <= offsets
    assert max(offsets) > 4
    assert groups == {1, 2, 3}
    assert has_full_attention == {False, True}


def test_large_and_short_histories_have_declared_windows_alone() -> None:
    (large,) = {each.spec.windows for each in large_histories(FixedWindowCache, {}, "cpu")}
    short = next(empty_histories(FixedWindowCache)).spec.windows
    assert large == short == (5, None)


def test_shrinking_keeps_to_declared_windows() -> None:
    class TwoSizes(FixedWindowCache):
        windows = WindowTraits(groups=2, sizes=(5, 2, None))

    history = History(CacheSpec(num_layers=2, windows=(5, None)), (Prefill(0, 5),))
    shrunk = {each.spec.windows for each in smaller_caches(TwoSizes, history)}
    assert shrunk == {(5, None), (5,), (None,), (2, None)}


SPEC = CacheSpec(num_layers=2, block_size=2, num_blocks=12, windows=(3, None))
STEPS = (Prefill(0, 5), Fork(0, 1), Append((1, 0)), Truncate(0, 5), Append((0,)))


@pytest.mark.parametrize("adapter", RIGHT)
def test_history_with_windows_is_saved_and_replayed(adapter: type[KVCacheAdapter]) -> None:
    history = History(SPEC, STEPS)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "windows=(3, None)" in history.describe()
    run_history(adapter, history)


def test_saved_history_without_windows_is_loaded() -> None:
    history = History(CacheSpec(), (Append((0,)),))
    saved = history.to_json()
    del saved["spec"]["windows"]
    assert History.from_json(saved) == history
    assert "windows" not in history.describe()


def test_truncation_into_freed_blocks_must_be_refused() -> None:
    history = History(SPEC, (Prefill(0, 6), Truncate(0, 3)))
    run_history(WindowCache, history)
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(TruncatesIntoFreedBlocks, history)


def test_failure_names_attention_to_a_token_before_the_window() -> None:
    with pytest.raises(Divergence, match="as it would be with one token from before the window"):
        run_history(AttendsToATokenTooMany, History(SPEC, (*STEPS, Append((0, 1)))))


def test_picture_shows_freed_blocks() -> None:
    oracle = oracle_with_windows(2, None)
    write(oracle, 0, 3)
    snapshot = Snapshot(tables={(0, 0): [None, 4], (0, 1): [2, 3]})
    drawing = picture(Location(0, {0: 0}), 2, oracle, snapshot)
    assert "sequence 0: >[given back]< [0.2]\n" in drawing
    assert "sequence 0: >none< 4x?" in drawing
    assert "[0.0 0.1]" in picture(Location(1, {0: 1}), 2, oracle, snapshot)


# ------------------------------------------------------------------- validation of adapters


class UsesTokensWithForks(WindowCache):
    def use_tokens(self, token_ids: object) -> None: ...


class FindsAll(WindowedTextCache):
    prefixes = WindowedTextCache.prefixes.but(finds="all")


class EvictsInOrder(WindowedTextCache):
    prefixes = WindowedTextCache.prefixes.but(evicts="least recent")


class Preempts(WindowCache):
    def preempt(self, seq: int) -> None: ...

    def resume(self, seq: int, key: object, value: object) -> None: ...


class SwapsOut(WindowCache):
    def swap_out(self, seq: int) -> None: ...


class Rounds(WindowCache):
    tolerance: ClassVar[Mapping[str, Tolerance]] = {"int8": Tolerance(1 / 200)}


class CountsRows(WindowCache):
    row_conditions: ClassVar[Mapping[str, str]] = {"fresh": "fresh"}


class FreesByTheNextTry(WindowCache):
    windows = WindowCache.windows.but(frees="next try")


class ReservesWithoutPrefill(LazyCache):
    prefill: Any = ListCache.prefill  # not offered


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            FreesByTheNextTry,
            "windows.frees is 'next try', which is for a cache that",
        ),
        (UsesTokensWithForks, "defines fork, which cannot be judged with windows and texts yet"),
        (
            FindsAll,
            "prefixes.finds is 'all'; with windows and texts, 'some' alone can",
        ),
        (
            EvictsInOrder,
            "prefixes.evicts is 'least recent'; with windows and texts, 'any'",
        ),
        (Preempts, "defines preempt, which cannot be judged with windows yet"),
        (SwapsOut, "defines swap_out, which cannot be judged with windows yet"),
        (Rounds, "has a tolerance, which cannot be judged with windows yet"),
        (CountsRows, "has row_conditions"),
        (ReservesWithoutPrefill, "must define prefill"),
    ],
)
def test_unsupported_adapter_with_windows_is_refused(
    adapter: type[KVCacheAdapter], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        refuse_mistakes(adapter)


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"groups": -1}, "WindowTraits: groups is -1; write how many"),
        ({"pools": "both"}, "pools is 'both'; choose one of 'own', 'shared'"),
        ({"frees": "never"}, "frees is 'never'; choose one of 'at once', 'next write', "),
        ({"sizes": (0,)}, "sizes has 0; write the windows that a layer can have"),
        ({"sizes": (4, 4, None)}, "groups is 3, and sizes has 2 windows"),
        ({"groups": 0, "sizes": (4,)}, "groups is 0, and sizes has 1 windows"),
    ],
)
def test_invalid_window_trait_is_refused_on_creation(traits: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        WindowCache.windows.but(**traits)
