"""Look-ahead blocks: tables may be longer than their tokens need, and broken caches fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import (
    CacheFull,
    CacheSpec,
    Divergence,
    History,
    Oracle,
    WindowTraits,
    conformance,
    run_history,
)
from pytest_roseinfer.capabilities.block_tables import Lookahead
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.large import large_histories
from pytest_roseinfer.run.machine import HistoryRunner
from pytest_roseinfer.run.metamorphic import check_copied, check_permuted, check_split, roomy
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.lookahead_caches import (
    BROKEN,
    RIGHT,
    KeepsTheBlocksOfAllDrafts,
    LookaheadCache,
    LooksAheadTooFar,
    SharesLookaheadBlocks,
    SparingCache,
)
from tests.capabilities.caches.paged_cache import PagedCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(num_layers=1, num_heads=1, block_size=4, num_blocks=6)


def run(adapter: type[KVCacheAdapter], *steps: Operation, num_blocks: int = 6) -> HistoryRunner:
    machine = HistoryRunner(adapter, History(replace(SPEC, num_blocks=num_blocks), steps))
    machine.run()
    return machine


def test_tables_may_have_the_declared_blocks_more() -> None:
    machine = run(LookaheadCache, Prefill(0, 5), Append((0,)), Truncate(0, 2))
    assert len(machine.adapter.table(0, 0)) == 3
    with pytest.raises(Divergence, match="sequence 0 has 4 blocks for 4 tokens; 1 to 3 are right"):
        run(LooksAheadTooFar, Prefill(0, 4))
    with pytest.raises(Divergence, match="sequence 0 has 5 blocks for 1 tokens; 1 to 3 are right"):
        run(KeepsTheBlocksOfAllDrafts, Prefill(0, 9), Truncate(0, 1))


def test_table_must_not_be_longer_without_the_declaration() -> None:
    undeclared = type("Undeclared", (LookaheadCache,), {"lookahead_blocks": 0, "most_blocks": most})
    with pytest.raises(Divergence, match="sequence 0 has 2 blocks for 4 tokens; 1 are right"):
        run(undeclared, Prefill(0, 4))


def most(cache: LookaheadCache, length: int) -> int:
    return cache.blocks_of(length) + 1


def test_lookahead_block_must_not_be_shared() -> None:
    problem = r"block 4 is shared, and is a look-ahead block of sequence 0 \(sequences 0, 1\)"
    with pytest.raises(Divergence, match=problem):
        run(SharesLookaheadBlocks, Prefill(0, 4), Fork(0, 1))


STEPS = (Prefill(0, 4), Prefill(1, 4), Append((0,)), Append((1,)), Free(1), Append((0,)))


def test_write_without_room_for_lookahead_blocks_may_be_refused_or_not() -> None:
    """The third block of sequence 0 leaves none for the third of sequence 1."""
    strict, sparing = (run(each, *STEPS, num_blocks=6) for each in (LookaheadCache, SparingCache))
    assert strict.refused == {
        3: "refused: no room for look-ahead blocks",
        4: "refused: no room for look-ahead blocks",
    }
    assert sparing.refused == {}
    assert strict.oracle.length(0) == 5
    assert sparing.oracle.length(0) == 6


def test_write_with_room_for_lookahead_blocks_must_not_be_refused() -> None:
    class Refuses(LookaheadCache):
        def take(self) -> int:
            if len(self.unused) < 2:
                raise CacheFull
            return super().take()

    assert not run(LookaheadCache, *STEPS, num_blocks=8).refused
    with pytest.raises(Divergence, match="refused a write that fits"):
        run(Refuses, Prefill(0, 4), num_blocks=3)


def test_write_beyond_the_capacity_must_be_refused() -> None:
    assert (
        "no room (4 blocks needed, 3 free)"
        in run(SparingCache, Prefill(0, 13), num_blocks=3).refused[1]
    )


def test_step_that_takes_no_block_must_not_be_refused() -> None:
    class RefusesFrees(SparingCache):
        def free(self, seq: int) -> None:  # noqa: ARG002
            raise CacheFull

    with pytest.raises(Divergence, match="refused a step that fits"):
        run(RefusesFrees, Prefill(0, 4), Free(0), num_blocks=3)


def test_steps_of_a_refused_sequence_are_left_out() -> None:
    steps = (*STEPS[:2], Prefill(2, 4), Fork(2, 3), Append((2,)), Truncate(3, 1))
    assert run(LookaheadCache, *steps).completed_steps == [*steps[:3], steps[4]]


def test_counts_of_free_blocks_leave_out_lookahead_blocks() -> None:
    class RefusesThird(LookaheadCache):
        def append(self, seqs: Sequence[int], key: Any, value: Any) -> None:
            if 2 in seqs:
                raise CacheFull
            super().append(seqs, key, value)

    with pytest.raises(Divergence) as failure:
        run(RefusesThird, Prefill(0, 4), Append((2,)), num_blocks=9)
    assert "layer 0: 6 free by the oracle, 6 by the ledger; the cache's own" in str(failure.value)


def test_oracle_shares_pages_without_lookahead_blocks() -> None:
    oracle = Oracle(4, 9)
    oracle.append([(0, 5), (1, 4)], oracle.new_tokens([(0, 5), (1, 4)]))
    oracle.adopt_sharing(lambda _: {0: [3, 5, 6], 1: [3, 7]})
    assert [len(pages) for pages in oracle.sequences.values()] == [2, 1]
    assert oracle.pages_free() == 7


def test_large_and_roomy_histories_have_room_for_lookahead_blocks() -> None:
    for history in large_histories(LookaheadCache, {}, "cpu"):
        machine = HistoryRunner(LookaheadCache, history)
        machine.run()
        assert not machine.refused
    history = roomy(LookaheadCache, History(SPEC, STEPS))
    assert not run(LookaheadCache, *history.operations, num_blocks=history.spec.num_blocks).refused


def test_oracle_of_a_cache_without_lookahead_blocks_has_no_state_of_them() -> None:
    assert Oracle.of(PagedCache, SPEC).state(Lookahead) is None
    assert not Oracle.of(PagedCache, SPEC).uncertain_room
    assert Oracle.of(LookaheadCache, SPEC).uncertain_room


@pytest.mark.parametrize(
    ("base", "declared", "message"),
    [
        (PagedCache, {"lookahead_blocks": -1}, "is -1: write a number of blocks"),
        (PagedCache, {"lookahead_blocks": True}, "is True: write a number of blocks"),
        (ListCache, {"lookahead_blocks": 2}, "is 2: define ledger and table too"),
        (PagedCache, {"lookahead_blocks": 1, "atomic_batches": False}, "atomic_batches = False"),
        (PagedCache, {"lookahead_blocks": 1, "windows": WindowTraits(groups=1)}, "with windows"),
    ],
)
def test_lookahead_blocks_that_cannot_be_judged_are_refused(
    base: type[KVCacheAdapter], declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"Mine.lookahead_blocks .*{message}"):
        conformance(type("Mine", (base,), declared))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(2))
@pytest.mark.parametrize("adapter", BROKEN)
def test_broken_cache_with_lookahead_blocks_fails(
    adapter: type[KVCacheAdapter], seed_number: int
) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(adapter, 3000, seed_number, partial(run_history, adapter))


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", RIGHT)
@few_or_many_examples(8, 25)
def test_right_cache_with_lookahead_blocks_passes(
    adapter: type[KVCacheAdapter], examples: int
) -> None:
    check_drawn_histories(adapter, examples, 1, partial(run_history, adapter))
    for check in (check_copied, check_permuted, check_split):
        check_drawn_histories(adapter, 2 * examples // 5, 1, partial(check, adapter))


@pytest.mark.slow
def test_drawn_writes_are_accepted_and_refused_where_lookahead_blocks_decide() -> None:
    met = {"refused": 0, "stored": 0}

    def count(history: History) -> None:
        machine = HistoryRunner(LookaheadCache, history)
        machine.run()
        reasons = machine.refused.values()
        met["refused"] += any("look-ahead" in reason for reason in reasons)
        met["stored"] += len(machine.completed_steps) - len(reasons)

    check_drawn_histories(LookaheadCache, 50, 1, count)
    assert met["refused"] > 5
    assert met["stored"] > 250
