"""Windows: what left one is neither read nor kept, and caches that get it wrong are found."""

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
    conformance,
    run_history,
)
from pytest_roseinfer import settings as options
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.observation import Location, Snapshot
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Fill, Prefill, Reserve
from pytest_roseinfer.findings.divergence import picture
from pytest_roseinfer.histories.strategies import layer_windows
from pytest_roseinfer.oracle.pages import Windows, first_live
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches.broken_window_caches import (
    BROKEN,
    AttendsToATokenTooMany,
    CutsWhatItGaveBack,
)
from tests.capabilities.caches.broken_windowed_text_caches import BROKEN as BROKEN_WITH_TEXTS
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.window_cache import RIGHT, LazyCache, WindowCache
from tests.capabilities.caches.windowed_text_cache import WindowedTextCache
from tests.capabilities.test_truncation import short_run as short_run
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer import KVCacheAdapter


@pytest.mark.many_alike
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("adapter", [*BROKEN, *BROKEN_WITH_TEXTS])
def test_a_cache_that_gets_windows_wrong_is_found(
    adapter: type[KVCacheAdapter], number: int
) -> None:
    with pytest.raises(Divergence):
        drawn(adapter, 200, number, partial(run_history, adapter))


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("adapter", RIGHT)
def test_a_cache_that_gets_windows_right_passes(adapter: type[KVCacheAdapter]) -> None:
    options.set_current(options.Settings(examples=8, steps=12, seed=1))
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_fork_then_append_equals_copy_then_append()
    (row,) = TargetVerdict(coverage.current().of(adapter)).rows()
    assert (row.name, row.verdict) == ("block_left_window", "met")


@pytest.mark.usefixtures("short_run")
def test_a_cache_that_finds_texts_in_every_window_passes() -> None:
    tests = conformance(WindowedTextCache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


def test_what_a_window_needs_of_a_text_is_stored_or_it_is_not_found() -> None:
    """A window of 3 needs only the last two of 6 tokens, which lie in blocks of 2."""
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


# ------------------------------------------------------------------------------ what is live


def test_as_many_tokens_are_live_as_transformers_keeps() -> None:
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    for length in range(1, 8):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        assert length - first_live(4, length) == layer.keys.shape[2]


def test_as_many_blocks_are_skipped_as_in_vllm() -> None:
    """Its own example: of 7 computed tokens a window of 4 leaves out the first 4."""
    assert first_live(4, 7) == 4
    assert [first_live(window, 3) for window in (None, 1, 2, 3, 4, 5)] == [0, 3, 2, 1, 0, 0]


def windowed(*windows: int | None, capacity: int = 8, **declared: Any) -> Oracle:
    """Return an oracle of a cache whose blocks hold two tokens."""
    of_windows = {
        name: declared.pop(name) for name in ("shared_pool", "gives_back") & declared.keys()
    }
    return Oracle(2, capacity, windows=Windows(windows, **of_windows), **declared)


def given_back(oracle: Oracle, seq: int = 0) -> list[int]:
    return [oracle.count_out_of_window(seq, layer) for layer in range(len(oracle.windows.of_layer))]


def write(oracle: Oracle, seq: int, count: int) -> bool:
    """Append so many tokens if there is room."""
    rows = [(seq, count)]
    fits = oracle.fits(rows)
    if fits:
        oracle.append(rows, oracle.new_tokens(rows))
    return fits


def test_each_group_gives_back_what_left_its_window() -> None:
    oracle = windowed(1, 2, 3, None)
    write(oracle, 0, 5)
    assert given_back(oracle) == [2, 2, 1, 0]
    assert [len(oracle.live(0, layer)) for layer in range(4)] == [0, 1, 2, 5]


def test_what_is_given_back_by_the_next_write_makes_room_for_it() -> None:
    oracle = windowed(2, capacity=3, gives_back="next write")
    write(oracle, 0, 6)
    assert (given_back(oracle), oracle.pages_free()) == ([0], 0)
    assert oracle.fits([(0, 1), (1, 1)])
    assert not oracle.fits([(1, 1), (0, 1)]), "what a later row gives back comes too late"
    write(oracle, 0, 1)
    assert (given_back(oracle), oracle.pages_free()) == ([2], 1)


def test_what_is_given_back_at_once_makes_room_for_later_writes_alone() -> None:
    oracle = windowed(2, capacity=3)
    assert not write(oracle, 0, 7), "all its blocks are taken before any is given back"
    assert write(oracle, 0, 6)
    assert (given_back(oracle), oracle.pages_free()) == ([2], 2)


def test_groups_have_a_pool_each_or_share_one() -> None:
    for shared, room in ((False, {2: 7, None: 5}), (True, {None: 4})):
        oracle = windowed(2, None, shared_pool=shared)
        write(oracle, 0, 5)
        assert oracle.block_counts().free == room
        assert write(oracle, 1, 6) is not shared
    assert oracle.describe_free_blocks([(1, 6)]) == "4 blocks free for all windows"


def test_reserved_room_is_kept_until_it_is_written() -> None:
    oracle = windowed(2)
    Reserve((0,), (6,)).apply(oracle)
    assert given_back(oracle) == [0]
    Fill().apply(oracle)
    assert given_back(oracle) == [2]


def test_a_fork_shares_what_is_live_and_what_leaves_one_window_stays_in_the_other() -> None:
    oracle = windowed(3)
    write(oracle, 0, 5)
    oracle.fork(0, 1)
    assert (given_back(oracle, 1), oracle.pages_free()) == ([1], 6)
    write(oracle, 1, 1)
    assert oracle.pages_free() == 5, "its last page was copied"
    write(oracle, 1, 2)
    assert (given_back(oracle), given_back(oracle, 1)) == ([1], [3])
    assert oracle.pages_free() == 5, "sequence 0 holds two pages, sequence 1 the one behind them"
    oracle.free(0)
    assert oracle.pages_free() == 7


def test_a_page_that_one_sequence_gave_back_is_written_in_place_by_the_other() -> None:
    oracle = windowed(2, None)
    write(oracle, 0, 2)
    oracle.fork(0, 1)
    oracle.truncate(1, 1)
    write(oracle, 0, 2)
    before = oracle.block_counts().free
    write(oracle, 1, 1)
    after = oracle.block_counts().free
    assert {window: before[window] - after[window] for window in before} == {2: 0, None: 1}


@pytest.mark.parametrize("capacity", [3, 4])
def test_a_cut_copies_a_block_in_those_groups_where_another_holds_it(capacity: int) -> None:
    oracle = windowed(2, None, capacity=capacity, truncate_copies=True)
    write(oracle, 0, 4)
    oracle.fork(0, 1)
    write(oracle, 0, 2)
    assert oracle.block_counts().free == {2: capacity - 2, None: capacity - 3}
    assert oracle.truncations_fit([(1, 3)]) is (capacity == 4)
    oracle.truncate(1, 3)
    assert oracle.block_counts().free == {2: capacity - 2, None: capacity - 4}


def test_a_fork_that_shares_nothing_copies_what_is_still_held() -> None:
    for windows, fits in (((3,), True), ((3, None), False)):
        oracle = windowed(*windows, capacity=4, fork_shares="nothing")
        write(oracle, 0, 5)
        assert oracle.fork_fits(0) is fits


# ------------------------------------------------------------------------- whole histories


def test_windows_are_drawn_around_the_edges_of_blocks_and_mixed() -> None:
    offsets: set[int] = set()
    groups: set[int] = set()
    full: set[bool] = set()

    @seed(1)
    @hypothesis_settings(max_examples=80, deadline=None, database=None, phases=[Phase.generate])
    @given(layer_windows(4, block_size=4, groups=3))
    def note(windows: tuple[int | None, ...]) -> None:
        assert len(windows) == 4
        offsets.update(each - 4 for each in windows if each)
        groups.add(len({*windows}))
        full.add(None in windows)

    note()
    assert {-1, 0, 1} <= offsets
    assert max(offsets) > 4
    assert groups == {1, 2, 3}
    assert full == {False, True}


SPEC = CacheSpec(num_layers=2, block_size=2, num_blocks=12, windows=(3, None))
STEPS = (Prefill(0, 5), Fork(0, 1), Append((1, 0)), Truncate(0, 5), Append((0,)))


@pytest.mark.parametrize("adapter", RIGHT)
def test_a_history_with_windows_is_saved_and_run_again(adapter: type[KVCacheAdapter]) -> None:
    history = History(SPEC, STEPS)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "windows=(3, None)" in history.describe()
    run_history(adapter, history)


def test_a_trace_from_before_there_were_windows_is_read() -> None:
    history = History(CacheSpec(), (Append((0,)),))
    saved = history.to_json()
    del saved["spec"]["windows"]
    assert History.from_json(saved) == history
    assert "windows" not in history.describe()


def test_a_cut_into_what_was_given_back_must_be_refused() -> None:
    history = History(SPEC, (Prefill(0, 6), Truncate(0, 3)))
    run_history(WindowCache, history)
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(CutsWhatItGaveBack, history)


def test_one_token_too_many_is_named() -> None:
    with pytest.raises(Divergence, match="as it would be with one token from before the window"):
        run_history(AttendsToATokenTooMany, History(SPEC, (*STEPS, Append((0, 1)))))


def test_a_picture_shows_what_was_given_back() -> None:
    oracle = windowed(2, None)
    write(oracle, 0, 3)
    shown = Snapshot(tables={(0, 0): [None, 4], (0, 1): [2, 3]})
    drawing = picture(Location(0, {0: 0}), 2, oracle, shown)
    assert "sequence 0: >[given back]< [0.2]\n" in drawing
    assert "sequence 0: >none< 4x?" in drawing
    assert "[0.0 0.1]" in picture(Location(1, {0: 1}), 2, oracle, shown)


# ------------------------------------------------------------------ what an adapter may say


class HearsTextsOfForks(WindowCache):
    def use_tokens(self, said: object) -> None: ...


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


class TriesAllRows(WindowCache):
    windows = WindowCache.windows.but(gives_back="next try")


class CopiesInParts(LazyCache):
    prefill: Any = ListCache.prefill  # not offered


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            TriesAllRows,
            "windows.gives_back is 'next try', which is for a cache that",
        ),
        (HearsTextsOfForks, "defines fork, which cannot be judged with windows and texts yet"),
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
        (CopiesInParts, "must define prefill"),
    ],
)
def test_what_makes_no_sense_is_refused(adapter: type[KVCacheAdapter], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        refuse_mistakes(adapter)


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        ({"groups": -1}, "WindowTraits: groups is -1; write how many"),
        ({"pools": "both"}, "pools is 'both'; choose one of 'own', 'shared'"),
        ({"gives_back": "never"}, "gives_back is 'never'; choose one of 'at once', 'next write', "),
    ],
)
def test_a_trait_that_there_is_not_is_refused_where_it_is_written(
    traits: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        WindowCache.windows.but(**traits)
