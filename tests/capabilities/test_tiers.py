"""Lower tiers: blocks are stored and loaded, with failures, late and partial arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    TierTraits,
    Transfer,
    TransferResult,
    WindowTraits,
    conformance,
    run_history,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.prefixes import LookUp
from pytest_roseinfer.capabilities.tiers import (
    DONE,
    FULL,
    PART,
    TWICE,
    UNNOTICED,
    End,
    EndLoad,
    EndTransfer,
    LoadPrefix,
    RestartTiers,
    TierBooks,
    result_of,
    tiers_of,
)
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run import coverage
from pytest_roseinfer.suite.exhaustive import every_step
from tests.capabilities.caches import broken_tier_caches
from tests.capabilities.caches.broken_tier_caches import BROKEN, CountsAFailedLoad
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.tier_cache import (
    RIGHT,
    ChecksumCache,
    LoadsAtOnceCache,
    StoresEvictedCache,
    WriteBackCache,
    WriteThroughCache,
)
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

CONDITIONS = {
    "block_loaded",
    "load_failed",
    "load_in_part",
    "block_left_under_store",
    "restarted_warm",
    "restarted_empty",
}
EVICTED = (Prefill(0, 4), EndTransfer(), Free(0), Prefill(1, 6), Free(1), EndTransfer())
"""Two blocks of text 0, which are stored, and evicted for a text of three blocks."""
LOADED = (LookUp(2, 4), LoadPrefix(2), EndLoad(2))
"""The same text for sequence 2."""


def history(*steps: Operation, blocks: int = 3) -> History:
    spec = CacheSpec(num_layers=2, block_size=2, num_blocks=blocks)
    return History(spec, steps, texts=((0, 0), (0, 0)))


def failure_of(cache: type[KVCacheAdapter], *steps: Operation) -> str:
    with pytest.raises(Divergence) as failure:
        run_history(cache, history(*steps))
    return failure.value.summary


def search(cache: type[KVCacheAdapter], seed_number: int, examples: int) -> None:
    @hypothesis_settings(
        max_examples=examples, database=None, phases=[Phase.generate], deadline=None
    )
    @seed(seed_number)
    @given(histories(cache))
    def check(drawn: History) -> None:
        run_history(cache, drawn)

    check()


RARE = (
    broken_tier_caches.StoresAPartAsTheWhole,
    broken_tier_caches.ReusesASlotBeingRead,
    broken_tier_caches.TrustsWhatArrives,
    broken_tier_caches.LoadsIntoTheTail,
    broken_tier_caches.LoadsFromTheFirstBlock,
)
"""Caches whose faults some hundreds of histories may not show."""


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize(
    "cache",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in RARE)) for each in BROKEN],
    ids=lambda cache: cache.__name__,
)
def test_cache_with_broken_tiers_fails(cache: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        search(cache, seed_number, examples=1000)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("cache", RIGHT, ids=lambda cache: cache.__name__)
@few_or_many_examples(8, 60)
def test_cache_with_right_tiers_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    search(cache, 1, examples)


def test_conditions_of_tiers_are_required() -> None:
    assert set(coverage.Coverage().of(WriteThroughCache).conditions) >= CONDITIONS
    assert CONDITIONS.isdisjoint(coverage.Coverage().of(TextCache).conditions)
    assert "block_left_under_store" not in coverage.Coverage().of(StoresEvictedCache).conditions


@pytest.mark.parametrize("cache", [WriteThroughCache, WriteBackCache])
def test_evicted_blocks_are_loaded(cache: type[KVCacheAdapter]) -> None:
    counts = run_history(cache, history(*EVICTED, EndTransfer(), *LOADED))
    assert counts["block_loaded"] == 1


@pytest.mark.parametrize("cache", [WriteThroughCache, WriteBackCache])
@pytest.mark.parametrize(
    ("result", "met"), [("failed", "load_failed"), (PART, "load_in_part")], ids=str
)
def test_blocks_that_did_not_arrive_are_written_again(
    cache: type[KVCacheAdapter], result: str, met: str
) -> None:
    steps = (*LOADED[:2], EndLoad(2, result, 1), Append((2,)), Append((2,)))
    counts = run_history(cache, history(*EVICTED, EndTransfer(), *steps))
    assert counts[met] == 1


def test_blocks_may_be_stored_when_they_are_evicted() -> None:
    evicted = (Prefill(0, 4), Free(0), Prefill(1, 6), Free(1))
    assert run_history(StoresEvictedCache, history(*evicted, *LOADED))["block_loaded"] == 1

    class Undeclared(StoresEvictedCache):
        tiers = TierTraits()

    found = "match_tiers() of text 0, 6 tokens long, found 4, and only 0 of them are stored"
    assert failure_of(Undeclared, *evicted).startswith(found)


def test_store_outlives_the_sequence() -> None:
    counts = run_history(WriteThroughCache, history(Prefill(0, 4), Free(0), EndTransfer()))
    assert counts["block_left_under_store"] == 1


def test_load_outlives_the_sequence() -> None:
    steps = (*LOADED[:2], Free(2), Append((1,)), EndTransfer(), Append((1,)))
    run_history(WriteThroughCache, history(*EVICTED, *steps))


def test_restarts_are_counted() -> None:
    steps = (*EVICTED, RestartTiers(keep=True), RestartTiers(keep=False), *LOADED)
    counts = run_history(WriteThroughCache, history(*steps))
    assert (counts["restarted_warm"], counts["restarted_empty"]) == (1, 1)
    assert not counts["block_loaded"]


def test_failure_names_what_arrived() -> None:
    steps = (*EVICTED, *LOADED[:2], EndLoad(2, "failed"))
    assert failure_of(CountsAFailedLoad, *steps) == (
        "sequence 2 has 4 tokens after its load, and 0 are right: 0 were stored, and 0 of "
        "2 blocks arrived"
    )


class LosesLoads(WriteThroughCache):
    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        counts = super().load_prefix(prefix, seq)
        self.copies = {}
        return counts


class ForgetsALoadLater(WriteThroughCache):
    def append(self, *arguments: Any) -> None:
        super().append(*arguments)
        for each in self.copies.values():
            self.let_go(each)
        self.copies = {}


class ListsAnEndedTransfer(WriteThroughCache):
    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        return super().end_transfer(transfer, result) if transfer.id != -1 else None

    def transfers_in_flight(self) -> list[Transfer]:
        return [*super().transfers_in_flight(), Transfer(-1, "move")]


class ReturnsNoCount(WriteThroughCache):
    def end_transfer(self, transfer: Transfer, result: TransferResult) -> int | None:
        super().end_transfer(transfer, result)
        return None


class ReturnsOneCount(WriteThroughCache):
    def load_prefix(self, prefix: Any, seq: int) -> Any:
        return sum(super().load_prefix(prefix, seq))


class ListsOneTwice(WriteThroughCache):
    def transfers_in_flight(self) -> list[Transfer]:
        return super().transfers_in_flight() * 2


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (LosesLoads, "begins to load 4 tokens, and transfers_in_flight() lists no load of"),
        (ForgetsALoadLater, "lacks transfer 2, for which sequence 2 waits"),
        (ReturnsNoCount, "end_transfer() returned None for a load"),
        (ReturnsOneCount, "load_prefix() returned 4; it must return the numbers of tokens"),
        (ListsOneTwice, "return transfers of different ids"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_answers_are_named(cache: type[KVCacheAdapter], problem: str) -> None:
    steps = (*EVICTED, *LOADED[:2], Append((1,)), LOADED[2])
    assert problem in failure_of(cache, *steps)


def test_ended_transfer_leaves_the_list() -> None:
    steps = (Append((0,)), EndTransfer())
    assert "still lists transfer -1" in failure_of(ListsAnEndedTransfer, *steps)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("done", TransferResult(3, 3)),
        (TWICE, TransferResult(3, 3, reports=2)),
        ("failed", TransferResult(0, 0)),
        (FULL, TransferResult(0, 0, full=True)),
        (PART, TransferResult(1, 1)),
        (UNNOTICED, TransferResult(1, 3)),
    ],
)
def test_results(name: str, result: TransferResult) -> None:
    assert result_of(Transfer(0, "store", (4, 5, 6)), name, 4) == result


def test_a_load_finds_no_full_tier() -> None:
    assert result_of(Transfer(0, "load", (4,), 1), FULL, 0) == TransferResult(0, 0)


def results_of(cache: type[KVCacheAdapter]) -> set[str]:
    """Draw histories, and return the results of their transfers."""
    drawn: set[str] = set()

    @hypothesis_settings(max_examples=100, database=None, phases=[Phase.generate], deadline=None)
    @seed(1)
    @given(histories(cache))
    def note(example: History) -> None:
        drawn.update(s.result for s in example.operations if isinstance(s, EndLoad | EndTransfer))

    note()
    return drawn


@pytest.mark.slow
def test_unnoticed_losses_are_drawn_for_caches_that_verify() -> None:
    assert UNNOTICED in results_of(ChecksumCache)
    assert UNNOTICED not in results_of(WriteThroughCache)


def test_transfers_that_cannot_fail_succeed() -> None:
    assert results_of(LoadsAtOnceCache) == {DONE}
    required = CONDITIONS.intersection(coverage.Coverage().of(LoadsAtOnceCache).conditions)
    assert required == CONDITIONS - {"load_failed", "load_in_part"}
    oracle = Oracle(2, 3)
    oracle.sequences[0] = []
    tiers_of(oracle)
    steps = every_step(LoadsAtOnceCache, oracle)
    assert {each.result for each in steps if isinstance(each, EndTransfer)} == {DONE}


def test_load_may_be_made_when_it_begins() -> None:
    counts = run_history(LoadsAtOnceCache, history(*EVICTED, *LOADED[:2]))
    assert counts["block_loaded"] == 1
    # Its blocks are still in the first tier.
    counts = run_history(LoadsAtOnceCache, history(Prefill(0, 4), EndTransfer(), *LOADED[:2]))
    assert not counts["block_loaded"]


def stored(*names: Sequence[int], keeps: int) -> TierBooks:
    """Return the books after each of these blocks was stored."""
    books = TierBooks()
    for number, block in enumerate(names):
        transfer = Transfer(number, "store", (0,))
        books = books.begin(transfer, [frozenset({tuple(block)})]).evict(keeps)
        books = books.end(End(transfer, TransferResult(1, 1))).evict(keeps)
    return books


def test_stored_blocks_must_be_found_until_one_may_be_evicted() -> None:
    assert stored([1], [2], [1], keeps=2).stored == {(1,), (2,)}
    assert stored([1], [2], [3], keeps=2).stored == frozenset()
    assert stored([1], [2], [3], keeps=2).findable == {(1,), (2,), (3,)}


def test_stored_part_may_be_found_and_need_not() -> None:
    transfer = Transfer(0, "store", (0, 1))
    books = TierBooks().begin(transfer, [frozenset({(1,)}), frozenset({(2,)})])
    part = books.end(End(transfer, TransferResult(1, 1)))
    assert part.findable == {(1,)}
    assert not part.stored
    assert books.vanish([0]).findable == {(1,), (2,)}
    assert part.restart(moving=False) == TierBooks()
    assert part.restart(moving=True).findable == {(1,)}
    assert books.restart(moving=False).in_flight == books.in_flight


def test_tokens_that_were_never_written_are_dropped() -> None:
    oracle = Oracle(4, 9)
    oracle.append([(0, 10)], oracle.new_tokens([(0, 10)]))
    tokens = oracle.tokens(0)
    oracle.drop_unwritten(0, 6)
    assert oracle.tokens(0) == tokens[:6]
    assert oracle.pages_free() == 7
    assert oracle.new_tokens([(0, 1)]) == [tokens[6]]


def test_tiers_need_their_methods() -> None:
    class Half(TextCache):
        def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:  # noqa: ARG002
            return 0, 0

    with pytest.raises(TypeError, match="transfers_in_flight"):
        conformance(Half)


def test_tiers_are_refused_with_windows_and_wrong_numbers() -> None:
    windowed = type("Windowed", (WriteThroughCache,), {"windows": WindowTraits(groups=2)})
    with pytest.raises(TypeError, match="load_prefix, which cannot be judged with windows"):
        refuse_mistakes(windowed)
    negative = type("Negative", (WriteThroughCache,), {"tiers": TierTraits(keeps=-1)})
    with pytest.raises(TypeError, match=r"tiers\.keeps is -1: write a number of blocks"):
        refuse_mistakes(negative)
