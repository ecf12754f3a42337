"""Truncation: sequences are truncated at any length, and broken caches fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer import settings as options
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import Snapshot
from pytest_roseinfer.capabilities.truncation import Truncate, TruncateMany
from pytest_roseinfer.capabilities.writes import Append, AppendMany, Prefill
from pytest_roseinfer.findings.divergence import picture
from pytest_roseinfer.oracle.pages import token_of
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.metamorphic import check_every_option, check_permuted, check_split
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.broken_window_caches import ChecksGroupByGroup
from tests.capabilities.caches.truncating_caches import (
    BROKEN,
    RIGHT,
    CopiesAtTheCut,
    CountsABlockOfTwoAsFree,
    CutCache,
    MissesABlockOfTwo,
    StateCache,
    TrimsAnyState,
    TrimsBeforeItRefuses,
)
from tests.capabilities.caches.window_cache import CopyingCache, TryingCache
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(num_layers=1, num_heads=1, block_size=4, num_blocks=6)


@pytest.fixture
def short_run() -> Iterator[None]:
    """Keep settings and coverage of the enclosing run from those of a test."""
    previous_settings, previous_coverage = options.current(), coverage.current()
    coverage.set_current(coverage.Coverage())
    yield
    options.set_current(previous_settings)
    coverage.set_current(previous_coverage)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(2))
@pytest.mark.parametrize("adapter", BROKEN)
def test_broken_truncating_cache_fails(adapter: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence) as failure:
        check_drawn_histories(adapter, 3000, seed_number, partial(run_history, adapter))
    steps = failure.value.history.operations
    assert any(isinstance(step, (Truncate, TruncateMany)) for step in steps)


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("adapter", RIGHT)
def test_right_truncating_cache_passes(adapter: type[KVCacheAdapter]) -> None:
    options.set_current(options.Settings(examples=20, steps=12, seed=1))
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_fork_then_append_equals_copy_then_append()


def verifies_drafts(history: History) -> bool:
    """Return True if a sequence gets several tokens, loses some, and gets one token."""
    states: dict[int, str] = {}
    for step in history.operations:
        match step:
            case Truncate(seq=seq):
                cut = [seq]
            case TruncateMany():
                cut = [*step.seqs]
            case _:
                cut = []
        states |= {seq: "cut" for seq in cut if states.get(seq) == "drafted"}
        for seq, count in step.rows():
            if states.get(seq) == "cut" and count == 1:
                return True
            states[seq] = "drafted" if count > 1 else ""
    return False


@pytest.mark.slow
def test_histories_often_draft_truncate_and_continue() -> None:
    """Speculation does this to a cache. It is drawn in one of four histories, over 500."""
    verified: list[bool] = []
    check_drawn_histories(
        GroupedManager, 200, 1, lambda history: verified.append(verifies_drafts(history))
    )
    assert sum(verified) > len(verified) / 8


def cuts_of_the_prelude(adapter: type[KVCacheAdapter], *, groups: int) -> Counter[tuple[int, bool]]:
    """Count the first cuts of preludes, by free blocks before them and whether they fit."""
    cuts: Counter[tuple[int, bool]] = Counter()

    def count(history: History) -> None:
        oracle = Oracle.of(adapter, history.spec)
        for at, step in enumerate(history.operations):
            begins = [type(each) for each in history.operations[:4]]
            if (
                isinstance(step, TruncateMany)
                and begins == [Prefill, Prefill, Fork, Fork]
                and len({*history.spec.windows}) in (0, groups)
                and at < 9
            ):
                cuts[oracle.pages_free(), step.fits(oracle)] += 1
                return
            step.apply(oracle)

    check_drawn_histories(adapter, 250, 1, count)
    return cuts


@pytest.mark.slow
def test_histories_cut_with_little_room() -> None:
    cuts = cuts_of_the_prelude(CopiesAtTheCut, groups=1)
    assert all(cuts[free, True] for free in range(3))
    assert cuts[0, False]


@pytest.mark.slow
def test_histories_cut_with_room_for_one_group_of_two() -> None:
    assert cuts_of_the_prelude(CopyingCache, groups=2)[1, False] > 2


BLOCKS_OF_TWO = (Prefill(0, 8), Prefill(1, 4), Fork(0, 2), Fork(1, 3))


def test_block_that_two_rows_leave_makes_room_for_a_copy() -> None:
    steps = (*BLOCKS_OF_TWO, Prefill(4, 12), TruncateMany((0, 2, 1), (4, 4, 3)))
    run_history(CopiesAtTheCut, History(SPEC, steps))
    with pytest.raises(Divergence, match="refused a step that fits"):
        run_history(MissesABlockOfTwo, History(SPEC, steps))
    early = (*steps[:-1], TruncateMany((0, 1), (4, 3)))
    run_history(CopiesAtTheCut, History(SPEC, early))
    with pytest.raises(Divergence, match=r"expected shape \[8, 1, 4\], found \[4"):
        run_history(CountsABlockOfTwoAsFree, History(SPEC, early))


def test_cut_needs_a_block_for_each_group_of_a_pool() -> None:
    spec = replace(SPEC, num_layers=2, num_blocks=7, windows=(None, 9))
    history = History(spec, (*BLOCKS_OF_TWO, TruncateMany((1,), (3,))))
    run_history(CopyingCache, history)
    with pytest.raises(Divergence, match="accepted a step that does not fit"):
        run_history(ChecksGroupByGroup, history)


def test_refused_row_frees_blocks_in_a_comparison_too() -> None:
    """Without them, the comparison left out the append, and sequence 1 could not be freed."""
    spec = CacheSpec(num_layers=1, num_heads=1, block_size=1, num_blocks=2, windows=(1,))
    steps = (Prefill(0, 2), AppendMany((0,), (3,)), Append((1,)), Free(1))
    check_split(TryingCache, History(spec, steps))


def appends(times: int, seq: int = 0) -> list[Append]:
    return [Append((seq,))] * times


def test_impossible_truncation_must_be_refused() -> None:
    history = History(SPEC, (*appends(6), Truncate(0, 3), *appends(1)))
    run_history(StateCache, history)
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(TrimsAnyState, history)
    with pytest.raises(Divergence, match="sequence 0"):
        run_history(TrimsBeforeItRefuses, history)


@pytest.mark.slow
def test_truncations_are_drawn_around_block_edges_and_in_shared_blocks() -> None:
    cuts: Counter[str] = Counter()

    def count_cuts(history: History) -> None:
        oracle = Oracle.of(GroupedManager, history.spec)
        size = history.spec.block_size
        for step in history.operations:
            if isinstance(step, Truncate):
                stored, pages = oracle.length(step.seq), oracle.sequences[step.seq]
                kept = pages[: -(-step.length // size)]
                cuts["nothing to do"] += step.length == stored
                cuts["to nothing"] += step.length == 0 < stored
                cuts["at an edge"] += step.length % size == 0 < step.length < stored
                cuts["one before it"] += step.length % size == size - 1 < stored
                cuts["one after it"] += step.length % size == 1 < size and step.length < stored
                cuts["across blocks"] += len(pages) - len(kept) > 1
                cut = step.length % size and step.length < stored
                cuts["within a shared block"] += bool(cut and kept[-1].holders > 1)
                cuts["no room"] += not step.fits(oracle)
            step.apply(oracle)

    check_drawn_histories(GroupedManager, 200, 1, count_cuts)
    assert min(cuts.values()) >= 1, cuts
    assert len(cuts) == 8


def cut_oracle(*, truncate_copies: bool, capacity: int = 9) -> Oracle:
    """Return an oracle in which sequence 0 is cut within a page that sequence 1 shares."""
    oracle = Oracle(4, capacity, truncate_copies=truncate_copies)
    oracle.append([(0, 7)], oracle.new_tokens([(0, 7)]))
    oracle.fork(0, 1)
    oracle.truncate(0, 5)
    return oracle


@pytest.mark.parametrize("truncate_copies", [False, True])
def test_truncated_sequence_sees_fewer_tokens_of_a_shared_page(truncate_copies: bool) -> None:
    oracle = cut_oracle(truncate_copies=truncate_copies)
    assert [oracle.length(seq) for seq in (0, 1)] == [5, 7]
    truncated, untouched = oracle.sequences[0], oracle.sequences[1]
    assert (truncated[0] is untouched[0], truncated[1] is untouched[1]) == (
        True,
        not truncate_copies,
    )
    assert oracle.pages_free() == 7 - truncate_copies
    assert oracle.conditions_met([(0, 1)]) == ["in_place" if truncate_copies else "copy_on_write"]
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.tokens(0) == [*(token_of(0, at) for at in range(5)), token_of(0, 5, life=1)]
    assert oracle.tokens(1) == [token_of(0, at) for at in range(7)]
    assert oracle.pages_free() == 6


def test_fork_of_a_truncated_sequence_sees_the_same_tokens() -> None:
    oracle = cut_oracle(truncate_copies=False)
    oracle.fork(0, 2)
    oracle.free(1)
    oracle.free(0)
    assert oracle.tokens(2) == [token_of(0, at) for at in range(5)]
    oracle.append([(2, 1)], [token_of(2, 5)])
    assert oracle.tokens(2)[4:] == [token_of(0, 4), token_of(2, 5)]


def test_freed_pages_make_room_for_copies_in_one_batch() -> None:
    oracle = Oracle(4, 3, truncate_copies=True)
    oracle.append([(0, 8)], range(8))
    for child in (1, 2):
        oracle.fork(0, child)
    assert oracle.truncations_fit([(0, 1)])
    assert not oracle.truncations_fit([(0, 1), (1, 2)]), "page 2 is still held by sequence 2"
    assert oracle.truncations_fit([(0, 1), (2, 0), (1, 2)])
    assert oracle.truncations_fit([(0, 4), (1, 8), (2, 7)])


def test_picture_shows_the_tokens_each_sequence_sees() -> None:
    drawing = picture(None, 1, cut_oracle(truncate_copies=False), Snapshot())
    assert "sequence 0: [0.0 0.1 0.2 0.3]x2 [0.4]x2\n" in drawing
    assert "sequence 1: [0.0 0.1 0.2 0.3]x2 [0.4 0.5 0.6]x2" in drawing


def test_truncations_are_described_reversed_and_saved() -> None:
    step = TruncateMany((0, 3), (2, 5))
    assert step.describe() == "truncate to these lengths: sequence 0 to 2, sequence 3 to 5"
    assert step.reversed() == TruncateMany((3, 0), (5, 2))
    assert step.halves() == [TruncateMany((0,), (2,)), TruncateMany((3,), (5,))]
    history = History(SPEC, (*appends(1), Truncate(0, 0), step))
    assert History.from_json(history.to_json()) == history


def test_histories_with_truncations_pass_the_metamorphic_checks() -> None:
    steps = (*appends(6), Fork(0, 1), TruncateMany((0, 1), (5, 2)), Append((1, 0)), Append((0, 1)))
    for check in (check_permuted, check_split):
        check(GroupedManager, History(options_of(GroupedManager), steps))


def test_options_with_and_without_truncation_are_compared() -> None:
    """A full window cannot be truncated: such steps are omitted for all options."""
    steps = (*appends(4), Truncate(0, 2), *appends(2), Truncate(0, 3), *appends(1))
    check_every_option(DynamicCacheAdapter, History(options_of(DynamicCacheAdapter), steps))


def options_of(adapter: type[KVCacheAdapter]) -> CacheSpec:
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    return CacheSpec(num_layers=1, block_size=4, num_blocks=12, options=options)


def test_freed_block_may_take_the_copy() -> None:
    """The arena's invariant allows changes of a block that was reused within the step."""
    steps = (*appends(4), Fork(0, 1), *appends(1), Truncate(0, 3), *appends(1))
    spec = options_of(GroupedManager)
    run_history(GroupedManager, History(spec, steps))
    run_history(CutCache, History(CacheSpec(block_size=4), steps))
