"""Checkpoints: sequences are truncated to recorded lengths only, and broken caches fail."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer.adapters.sharded import ShardedAdapter
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.truncation import Checkpoints, Truncate, TruncateMany
from pytest_roseinfer.capabilities.writes import Append, AppendMany, Prefill
from pytest_roseinfer.run.metamorphic import check_copied
from tests.capabilities.caches.checkpoint_caches import (
    BROKEN,
    RIGHT,
    EndsOfBlocksCache,
    EndsOfWritesCache,
    LastTwoCache,
    TruncatesWithoutACheckpoint,
)
from tests.capabilities.caches.swap_cache import SwapCache
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.truncating_caches import CutCache
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(num_layers=1, num_heads=1, block_size=4, num_blocks=8)
CHECKPOINTS: dict[str, Any] = {"truncation": EndsOfWritesCache.truncation}


def after(*steps: Operation, adapter: type[KVCacheAdapter] = EndsOfWritesCache) -> Oracle:
    oracle = Oracle.of(adapter, SPEC)
    for step in steps:
        assert step.apply(oracle)
    return oracle


def recorded(oracle: Oracle, seq: int) -> list[int]:
    state = oracle.state(Checkpoints)
    assert state
    return sorted(state.recorded.get(seq, ()))


WRITES = (Prefill(0, 3), Append((0,)), AppendMany((0,), (5,)))


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [(EndsOfWritesCache, [3, 4, 9]), (EndsOfBlocksCache, [4, 8]), (LastTwoCache, [4, 9])],
)
def test_writes_record_the_checkpoints_that_the_cache_declares(
    adapter: type[KVCacheAdapter], expected: list[int]
) -> None:
    oracle = after(*WRITES, adapter=adapter)
    assert recorded(oracle, 0) == expected
    allowed = [length for length in range(10) if oracle.allows_truncation(0, length)]
    assert allowed == sorted({0, *expected, 9})


def test_truncation_drops_the_checkpoints_after_the_cut() -> None:
    oracle = after(*WRITES, Truncate(0, 4), AppendMany((0,), (6,)))
    assert recorded(oracle, 0) == [3, 4, 10]
    assert not oracle.allows_truncation(0, 9)
    assert oracle.lengths_to_try(0) == [3, 4, 9]


def test_fork_has_the_checkpoints_of_its_parent_and_records_its_own() -> None:
    oracle = after(*WRITES, Fork(0, 1), AppendMany((1,), (2,)), AppendMany((0,), (3,)))
    assert recorded(oracle, 1) == [3, 4, 9, 11]
    assert recorded(oracle, 0) == [3, 4, 9, 12]


def test_next_sequence_of_a_name_begins_without_checkpoints() -> None:
    oracle = after(Prefill(0, 3), Free(0), Prefill(0, 7))
    assert recorded(oracle, 0) == [7]


@pytest.mark.parametrize(
    "cut", [Truncate(0, 5), TruncateMany((0,), (5,)), TruncateMany((1, 0), (2, 5))]
)
def test_truncation_without_a_checkpoint_must_be_refused(cut: Operation) -> None:
    steps = (*WRITES, Prefill(1, 2), cut, Append((0, 1)))
    run_history(EndsOfWritesCache, History(SPEC, steps))
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(TruncatesWithoutACheckpoint, History(SPEC, steps))


def test_truncation_to_a_checkpoint_must_not_be_refused() -> None:
    class Refuses(EndsOfWritesCache):
        def has_checkpoint(self, seq: int, length: int) -> bool:
            return length != 4 and super().has_checkpoint(seq, length)

    history = History(SPEC, (*WRITES, Truncate(0, 4)))
    run_history(EndsOfWritesCache, history)
    with pytest.raises(Divergence, match="raised CannotTrim: sequence 0 has no checkpoint at 4"):
        run_history(Refuses, history)


def test_cut_to_a_checkpoint_that_a_copy_lacks_is_not_compared() -> None:
    """The copy of a fork is one write, which records its end alone."""
    steps = (*WRITES, Fork(0, 1), Truncate(1, 4), Append((1,)), Truncate(0, 3))
    check_copied(EndsOfWritesCache, History(SPEC, steps))


@pytest.mark.slow
def test_histories_cut_to_checkpoints_present_and_former() -> None:
    present = former = never = 0

    def count(history: History) -> None:
        nonlocal present, former, never
        oracle = Oracle.of(EndsOfWritesCache, history.spec)
        for step in history.operations:
            if isinstance(step, Truncate) and 0 < step.length < oracle.length(step.seq):
                allowed = oracle.allows_truncation(step.seq, step.length)
                known = step.length in oracle.lengths_to_try(step.seq)
                present += allowed
                former += known and not allowed
                never += not known
            step.apply(oracle)

    check_drawn_histories(EndsOfWritesCache, 100, 1, count)
    assert min(present, former, never) > 10


class EndsOfWritesRanks(ShardedAdapter):
    of = EndsOfBlocksCache
    ranks = 2


def test_ranks_record_what_one_cache_records() -> None:
    assert recorded(after(*WRITES, adapter=EndsOfWritesRanks), 0) == [4, 8]
    history = History(SPEC, (*WRITES, Truncate(0, 8), Truncate(0, 7), Append((0,))))
    spec = CacheSpec(num_heads=2, num_blocks=8)
    run_history(EndsOfWritesRanks, History(spec, history.operations))


@pytest.mark.parametrize(
    ("base", "declared", "message"),
    [
        (CutCache, {"truncation": CutCache.truncation.but(lengths="checkpoints")}, "list the err"),
        (TextCache, CHECKPOINTS, "define truncate or truncate_many"),
        (SwapCache, CHECKPOINTS | {"truncate": CutCache.truncate}, "with swap_out yet"),
        (TextCache, CHECKPOINTS | {"truncate": CutCache.truncate}, "with use_tokens yet"),
        (CutCache, CHECKPOINTS, "define prefill"),
    ],
)
def test_checkpoints_that_cannot_be_judged_are_refused(
    base: type[KVCacheAdapter], declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"truncation.lengths is 'checkpoints'.*{message}"):
        conformance(type("Mine", (base,), declared))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(2))
@pytest.mark.parametrize("adapter", BROKEN)
def test_broken_cache_with_checkpoints_fails(
    adapter: type[KVCacheAdapter], seed_number: int
) -> None:
    with pytest.raises(Divergence, match=r"must refuse|raised CannotTrim"):
        check_drawn_histories(adapter, 3000, seed_number, partial(run_history, adapter))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", RIGHT)
def test_right_cache_with_checkpoints_passes(adapter: type[KVCacheAdapter]) -> None:
    check_drawn_histories(adapter, 25, 1, partial(run_history, adapter))
    check_drawn_histories(adapter, 10, 1, partial(check_copied, adapter))
