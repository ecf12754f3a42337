"""Caches that are given the tokens of sequences, and share blocks by equal prefixes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import (
    Append,
    Cancel,
    Fill,
    Prefill,
    Reservations,
    Reserve,
    reservations,
)
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.texts import WHOLE, Texts
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches import broken_text_caches, merging_caches, reserving_caches
from tests.capabilities.caches.branching_text_caches import BranchingTextCache, FindsWhatWasCut
from tests.capabilities.caches.merging_caches import MergesLater
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.reserving_caches import ReservingCache
from tests.capabilities.caches.tail_cache import TailCache
from tests.capabilities.caches.text_cache import (
    HashedTextCache,
    HashesOnce,
    RenewedTextCache,
    TextCache,
)
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.capabilities.operation import Operation


def test_texts_are_equal_up_to_their_branch() -> None:
    texts = Texts(((0, 0), (0, 3), (1, WHOLE)))
    assert texts.text_slice(0, 0, 5).tokens == [1, 1, 1, 1, 1]
    assert texts.text_slice(1, 0, 5).tokens == [1, 1, 1, 2, 1]
    assert texts.text_slice(2, 0, 5).tokens == [1, 1, 1, 2, 1]
    texts.fork(2, child=9, length=4)
    assert texts.text_slice(texts.of(9, life=0), 0, 6).tokens == [1, 1, 1, 2, 4, 1]
    texts.forget(9)
    assert texts.of(9, life=1) == 1


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    "cache",
    [
        TextCache,
        HashedTextCache,
        HashesOnce,
        RenewedTextCache,
        MergesLater,
        ReservingCache,
    ],
)
@few_or_many_examples(8, 60)
def test_cache_with_prefix_reuse_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    settings.set_current(settings.Settings(examples=examples, steps=20, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "broken",
    [*broken_text_caches.BROKEN, *merging_caches.BROKEN, *reserving_caches.BROKEN],
    ids=lambda cache: cache.__name__,
)
@pytest.mark.parametrize("seed_number", range(3))
def test_broken_prefix_reuse_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    @hypothesis_settings(max_examples=1000, database=None, phases=[Phase.generate], deadline=None)
    @seed(seed_number)
    @given(histories(broken))
    def check(history: History) -> None:
        run_history(broken, history)

    with pytest.raises(Divergence):
        check()


def test_cancelled_prompt_is_neither_filled_nor_found() -> None:
    steps = Reserve((0,), (3,)), Reserve((1,), (2,)), Cancel(0), Fill(), Prefill(2, 4)
    history = History(CacheSpec(block_size=2), steps, texts=((0, 0),))
    run_history(ReservingCache, history)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    with pytest.raises(Divergence, match="only 0 of them may be found now"):
        run_history(reserving_caches.KeepsTheTextOfCancelled, history)


@pytest.mark.parametrize("step", [Append((2,)), Append((0, 2)), Free(2)])
def test_step_with_a_sequence_that_is_reserved_after_all_is_left_out(step: Operation) -> None:
    """Sequences of equal texts share a block, so there is room that the drawing did not count."""
    steps = Append((0, 1)), Append((0, 1)), Reserve((2,), (1,)), step
    history = History(CacheSpec(block_size=2, num_blocks=2), steps, texts=((0, 0),))
    drawing = Oracle.of(ReservingCache, history.spec, history.texts)
    assert [each.apply(drawing) for each in steps[:3]] == [True, True, False]
    machine = HistoryRunner(ReservingCache, history)
    machine.run()
    assert machine.completed_steps == [*steps[:3]]


def test_reservation_of_several_sequences_cannot_be_cancelled() -> None:
    oracle = Oracle(2, 8, states={Reservations: Reservations()})
    for step in (Reserve((0, 1), (1, 1)), Reserve((2,), (1,)), Reserve((2,), (1,))):
        step.apply(oracle)
    assert [Cancel(seq).possible(oracle) for seq in range(4)] == [False, False, True, False]
    Cancel(2).apply(oracle)
    assert [len(each.rows) for each in reservations(oracle)] == [2]


SPEC = CacheSpec(block_size=2)
EQUAL_TEXTS = ((0, 0), (0, WHOLE))


def test_equal_and_branching_texts_pass() -> None:
    history = History(SPEC, (Prefill(0, 3), Prefill(1, 3), Append((0, 1)), Free(0), Append((1,))))
    run_history(TextCache, replace(history, texts=EQUAL_TEXTS))
    run_history(TextCache, replace(history, texts=((0, 0), (0, 1))))


def test_equal_block_after_another_prefix_is_another_block() -> None:
    colliding_history = History(SPEC, (Prefill(0, 4), Prefill(1, 4)), texts=((0, 0), (0, 1)))
    run_history(TextCache, colliding_history)
    with pytest.raises(Divergence, match=r"expected text 1, token 2, found text 0"):
        run_history(broken_text_caches.KeysByBlockAndPosition, colliding_history)


def test_step_that_fits_by_reuse_is_accepted() -> None:
    """Two blocks hold only one prompt; the same prompt needs no other block."""
    steps = (Prefill(0, 4), Prefill(1, 4))
    small = replace(SPEC, num_blocks=2)
    run_history(TextCache, History(small, steps, texts=EQUAL_TEXTS))
    run_history(TextCache, History(small, steps, texts=((0, 0), (0, 2))))


def test_history_with_texts_is_saved_and_described() -> None:
    history = History(SPEC, (Prefill(0, 3),), texts=((0, 0), (0, 3), (1, WHOLE)))
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "text 1 shares its first 3 tokens with text 0" in history.describe()
    assert "text 2 is equal to text 1" in history.describe()
    assert "sequence n has text n mod 3, and the next text when" in history.describe()
    description = replace(history, texts=((0, 0),)).describe()
    assert "all sequences have the same text, whose token ids are all 1" in description
    assert "mod" not in description


def test_saved_history_without_texts_is_loaded() -> None:
    saved = History(SPEC, (Append((0,)),)).to_json()
    del saved["texts"]
    assert History.from_json(saved).texts == ()


class SharesWithoutTexts(PagedCache):
    prefixes = PagedCache.prefixes.but(shares="equal prefixes")


class EvictsWithoutTexts(PagedCache):
    prefixes = PagedCache.prefixes.but(evicts="least recent")


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (SharesWithoutTexts, "cannot be judged without use_tokens: define it"),
        (
            EvictsWithoutTexts,
            "'least recent', which cannot be judged without use_tokens: define it",
        ),
    ],
)
def test_trait_that_needs_use_tokens_is_refused_without_it(
    adapter: type[KVCacheAdapter], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        conformance(adapter)


def test_unknown_policy_of_sharing_is_refused() -> None:
    with pytest.raises(TypeError, match="choose one of 'exact', 'equal prefixes', 'none'"):
        PagedCache.prefixes.but(shares="anyhow")


@pytest.mark.parametrize("branch_length", [0, WHOLE])
def test_only_a_hash_collision_excuses_a_short_lookup(branch_length: int) -> None:
    """The first tokens of texts 0 and 4 have one hash; those of texts 0 and 1 do not."""
    texts = ((0, 0),) * 4 + ((0, branch_length),)
    steps = (Append((0,)), Append((4,)), Free(4), Free(0))
    history = History(CacheSpec(block_size=1), steps, texts=texts)
    run_history(HashedTextCache, history)
    if branch_length:  # the texts are equal, and nothing collides
        with pytest.raises(Divergence, match="found 0, though 1 of them are stored"):
            run_history(broken_text_caches.DropsHits, history)
    else:
        run_history(broken_text_caches.DropsHits, history)


def test_hash_of_a_lookup_is_no_collision() -> None:
    """Text 4 is looked up after every step, and never stored."""
    steps = (Append((0,)), Free(0))
    history = History(CacheSpec(block_size=1), steps, texts=((0, 0),) * 5)
    with pytest.raises(Divergence, match="found 0, though 1 of them are stored"):
        run_history(broken_text_caches.DropsHits, history)


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    ("cache", "reported"), [(broken_text_caches.NeverHashes, True), (HashedTextCache, False)]
)
def test_unmet_hash_collision_fails_the_run(
    cache: type[KVCacheAdapter], reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 20)
    settings.set_current(settings.Settings(examples=20, steps=12, seed=1))
    conformance(cache)().test_histories()
    problems = TargetVerdict(coverage.current().of(cache)).problems(require_paths=True)
    assert any("hash_collision" in line for line in problems) == reported


TWO_CACHED = (Prefill(0, 2), Prefill(1, 2), Free(0), Free(1))
THREE_BLOCKS = replace(SPEC, num_blocks=3)
UNEQUAL_TEXTS = ((0, 0), (0, 0))


def test_refused_prompt_must_not_renew_what_it_found() -> None:
    """The prompt of text 0 has four blocks, one of which it finds."""
    steps = (*TWO_CACHED, Prefill(2, 8), Prefill(3, 4))
    history = History(THREE_BLOCKS, steps, texts=(*UNEQUAL_TEXTS, (0, WHOLE), (0, 0)))
    assert run_history(TextCache, history)["eviction_choice"] == 1
    with pytest.raises(Divergence, match="which was released earlier, in step 3 and not in step 4"):
        run_history(broken_text_caches.RenewsOnARefusal, history)


def test_prompt_beyond_capacity_must_be_refused() -> None:
    class AcceptsAnything(TextCache):
        def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
            if key.shape[1] <= 6:
                super().prefill(seq, key, value)

    history = History(THREE_BLOCKS, (Prefill(0, 2), Prefill(1, 8)), texts=UNEQUAL_TEXTS)
    run_history(TextCache, history)
    with pytest.raises(Divergence, match="accepted a write that does not fit"):
        run_history(AcceptsAnything, history)


def test_equal_blocks_do_not_exceed_the_capacity() -> None:
    oracle = Oracle(2, 3, branches=((0, 0), (0, WHOLE), (0, 2)))
    oracle.append([(0, 5)], oracle.new_tokens([(0, 5)]))
    assert not oracle.exceeds_capacity([(1, 6)])
    assert oracle.exceeds_capacity([(1, 7)])
    assert oracle.exceeds_capacity([(2, 3)])
    assert not oracle.exceeds_capacity([(2, 2), (0, 1)])
    assert oracle.exceeds_capacity([(0, 2)])


def test_block_must_not_be_evicted_while_others_are_free() -> None:
    steps = (Prefill(0, 2), Free(0), Append((1,)), Free(1), Append((2,)))
    history = History(THREE_BLOCKS, steps, texts=(*UNEQUAL_TEXTS, (0, 0)))
    run_history(TextCache, history)
    late = History(THREE_BLOCKS, (*steps, Append((4,)), Append((5,))), texts=((0, 0),) * 6)
    problem = "the write needs 1 block at most, and 1 that are not cached were free"
    with pytest.raises(Divergence, match=problem):
        run_history(broken_text_caches.EvictsWhileBlocksAreFree, late)


class EvictsAtAnyTime(broken_text_caches.EvictsWhileBlocksAreFree):
    prefixes = TextCache.prefixes.but(evicts_when="any time")


def test_block_may_be_evicted_early_unless_a_cache_declares_otherwise() -> None:
    steps = (Prefill(0, 2), Free(0), Append((1,)), Free(1), *(Append((n,)) for n in (2, 4, 5)))
    run_history(EvictsAtAnyTime, History(THREE_BLOCKS, steps, texts=((0, 0),) * 6))


def test_lookups_are_as_long_as_the_longest_sequence_was() -> None:
    steps = (Prefill(0, 4), Truncate(0, 1))
    history = History(CacheSpec(block_size=4), steps, texts=((0, 0),))
    run_history(BranchingTextCache, history)
    with pytest.raises(Divergence, match="5 tokens long, found 4, and only 0 of them"):
        run_history(FindsWhatWasCut, history)


@pytest.mark.slow
def test_histories_evict_one_of_two_cached_blocks() -> None:
    """Only such histories show which block a cache evicts first."""
    pattern = ("Prefill", "Prefill", "Free", "Free", "Prefill")
    counts = Counter[type[KVCacheAdapter]]()
    for cache in (TextCache, TailCache):

        def count(history: History, cache: type[KVCacheAdapter] = cache) -> None:
            counts[cache] += pattern == tuple(type(s).__name__ for s in history.operations[:5])

        check_drawn_histories(cache, 200, 1, count)
    assert counts[TextCache] >= 4
    assert counts[TailCache] < counts[TextCache] // 2, "expected fewer histories without an order"
