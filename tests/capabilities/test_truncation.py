"""Truncate: sequences are cut anywhere, and caches that get it wrong are found."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer import settings as options
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.observation import Snapshot
from pytest_roseinfer.capabilities.truncation import Truncate, TruncateMany
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.findings.divergence import picture
from pytest_roseinfer.oracle.pages import token_of
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.metamorphic import check_every_option, check_permuted, check_split
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager
from tests.capabilities.caches.truncating_caches import (
    BROKEN,
    RIGHT,
    CutCache,
    StateCache,
    TrimsAnyState,
    TrimsBeforeItRefuses,
)
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer import KVCacheAdapter

SPEC = CacheSpec(num_layers=1, num_heads=1, block_size=4, num_blocks=6)


@pytest.fixture
def short_run() -> Iterator[None]:
    """The searches of a test are those of a short run, whatever run it is part of."""
    asked, seen = options.current(), coverage.current()
    coverage.set_current(coverage.Coverage())
    yield
    options.set_current(asked)
    coverage.set_current(seen)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("adapter", BROKEN)
def test_a_cache_that_truncates_wrong_is_found(adapter: type[KVCacheAdapter], number: int) -> None:
    with pytest.raises(Divergence) as failure:
        drawn(adapter, 3000, number, partial(run_history, adapter))
    steps = failure.value.history.operations
    assert any(isinstance(step, (Truncate, TruncateMany)) for step in steps)


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("adapter", RIGHT)
def test_a_cache_that_truncates_right_passes(adapter: type[KVCacheAdapter]) -> None:
    options.set_current(options.Settings(examples=20, steps=12, seed=1))
    tests = conformance(adapter)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    tests.test_fork_then_append_equals_copy_then_append()


def verifies_drafts(history: History) -> bool:
    """Tell if a sequence gets several tokens, loses some of them, and gets the right one."""
    stands: dict[int, str] = {}
    for step in history.operations:
        match step:
            case Truncate(seq=seq):
                cut = [seq]
            case TruncateMany():
                cut = [*step.seqs]
            case _:
                cut = []
        stands |= {seq: "cut" for seq in cut if stands.get(seq) == "drafted"}
        for seq, count in step.rows():
            if stands.get(seq) == "cut" and count == 1:
                return True
            stands[seq] = "drafted" if count > 1 else ""
    return False


def test_many_histories_store_drafts_cut_them_and_go_on() -> None:
    """What speculation does to a cache. In one of four histories it is drawn, over 500."""
    seen: list[bool] = []
    drawn(GroupedManager, 200, 1, lambda history: seen.append(verifies_drafts(history)))
    assert sum(seen) > len(seen) / 8


def appends(times: int, seq: int = 0) -> list[Append]:
    return [Append((seq,))] * times


def test_what_cannot_be_trimmed_must_be_refused() -> None:
    history = History(SPEC, (*appends(6), Truncate(0, 3), *appends(1)))
    run_history(StateCache, history)
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(TrimsAnyState, history)
    with pytest.raises(Divergence, match="sequence 0"):
        run_history(TrimsBeforeItRefuses, history)


def test_cuts_are_drawn_at_the_edges_of_blocks_and_within_shared_ones() -> None:
    met: Counter[str] = Counter()

    def note(history: History) -> None:
        oracle = Oracle.of(GroupedManager, history.spec)
        size = history.spec.block_size
        for step in history.operations:
            if isinstance(step, Truncate):
                stored, pages = oracle.length(step.seq), oracle.sequences[step.seq]
                kept = pages[: -(-step.length // size)]
                met["nothing to do"] += step.length == stored
                met["to nothing"] += step.length == 0 < stored
                met["at an edge"] += step.length % size == 0 < step.length < stored
                met["before it"] += step.length % size == size - 1 < stored
                met["behind it"] += step.length % size == 1 < size and step.length < stored
                met["across blocks"] += len(pages) - len(kept) > 1
                cut = step.length % size and step.length < stored
                met["within a shared block"] += bool(cut and kept[-1].holders > 1)
                met["no room"] += not step.fits(oracle)
            step.apply(oracle)

    drawn(GroupedManager, 200, 1, note)
    assert min(met.values()) >= 1, met
    assert len(met) == 8


def cut_oracle(*, truncate_copies: bool, capacity: int = 9) -> Oracle:
    """Two sequences share a full page and one of three tokens; the first is cut within it."""
    oracle = Oracle(4, capacity, truncate_copies=truncate_copies)
    oracle.append([(0, 7)], oracle.new_tokens([(0, 7)]))
    oracle.fork(0, 1)
    oracle.truncate(0, 5)
    return oracle


@pytest.mark.parametrize("truncate_copies", [False, True])
def test_a_cut_sequence_sees_less_than_the_others(truncate_copies: bool) -> None:
    oracle = cut_oracle(truncate_copies=truncate_copies)
    assert [oracle.length(seq) for seq in (0, 1)] == [5, 7]
    mine, yours = oracle.sequences[0], oracle.sequences[1]
    assert (mine[0] is yours[0], mine[1] is yours[1]) == (True, not truncate_copies)
    assert oracle.pages_free() == 7 - truncate_copies
    assert oracle.conditions_met([(0, 1)]) == ["in_place" if truncate_copies else "copy_on_write"]
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.tokens(0) == [*(token_of(0, at) for at in range(5)), token_of(0, 5, life=1)]
    assert oracle.tokens(1) == [token_of(0, at) for at in range(7)]
    assert oracle.pages_free() == 6


def test_a_fork_of_a_cut_sequence_sees_as_much() -> None:
    oracle = cut_oracle(truncate_copies=False)
    oracle.fork(0, 2)
    oracle.free(1)
    oracle.free(0)
    assert oracle.tokens(2) == [token_of(0, at) for at in range(5)]
    oracle.append([(2, 1)], [token_of(2, 5)])
    assert oracle.tokens(2)[4:] == [token_of(0, 4), token_of(2, 5)]


def test_what_is_given_back_makes_room_for_copies() -> None:
    oracle = Oracle(4, 3, truncate_copies=True)
    oracle.append([(0, 8)], range(8))
    for child in (1, 2):
        oracle.fork(0, child)
    assert oracle.truncations_fit([(0, 1)])
    assert not oracle.truncations_fit([(0, 1), (1, 2)]), "page 2 is still held by sequence 2"
    assert oracle.truncations_fit([(0, 1), (2, 0), (1, 2)])
    assert oracle.truncations_fit([(0, 4), (1, 8), (2, 7)])


def test_a_picture_shows_what_a_sequence_sees() -> None:
    drawn = picture(None, 1, cut_oracle(truncate_copies=False), Snapshot())
    assert "sequence 0: [0.0 0.1 0.2 0.3]x2 [0.4]x2\n" in drawn
    assert "sequence 1: [0.0 0.1 0.2 0.3]x2 [0.4 0.5 0.6]x2" in drawn


def test_cuts_are_said_turned_and_read_from_json() -> None:
    step = TruncateMany((0, 3), (2, 5))
    assert step.describe() == "truncate to these lengths: sequence 0 to 2, sequence 3 to 5"
    assert step.reversed() == TruncateMany((3, 0), (5, 2))
    assert step.halves() == [TruncateMany((0,), (2,)), TruncateMany((3,), (5,))]
    history = History(SPEC, (*appends(1), Truncate(0, 0), step))
    assert History.from_json(history.to_json()) == history


def test_histories_with_cuts_are_compared_with_others_like_them() -> None:
    steps = (*appends(6), Fork(0, 1), TruncateMany((0, 1), (5, 2)), Append((1, 0)), Append((0, 1)))
    for check in (check_permuted, check_split):
        check(GroupedManager, History(options_of(GroupedManager), steps))


def test_options_that_trim_and_options_that_do_not_are_compared() -> None:
    """A window that is full cannot be cut: such steps are left out for all of them."""
    steps = (*appends(4), Truncate(0, 2), *appends(2), Truncate(0, 3), *appends(1))
    check_every_option(DynamicCacheAdapter, History(options_of(DynamicCacheAdapter), steps))


def options_of(adapter: type[KVCacheAdapter]) -> CacheSpec:
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    return CacheSpec(num_layers=1, block_size=4, num_blocks=12, options=usual)


def test_a_block_given_back_may_take_the_copy() -> None:
    """The arena's check lets a block change that was handed out again within the step."""
    steps = (*appends(4), Fork(0, 1), *appends(1), Truncate(0, 3), *appends(1))
    spec = options_of(GroupedManager)
    run_history(GroupedManager, History(spec, steps))
    run_history(CutCache, History(CacheSpec(block_size=4), steps))
