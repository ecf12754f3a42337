"""Resets of prefix caches: nothing that was stored before is found, and sequences go on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.epochs import Reset, ResetPolicy
from pytest_roseinfer.capabilities.forks import Copy, Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.payload import describe_token
from pytest_roseinfer.capabilities.preemption import Preempt, Preempted, Resume
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp
from pytest_roseinfer.capabilities.swapping import (
    FinishSwapIn,
    FinishSwapOut,
    SwapIn,
    SwapOut,
    Swapped,
)
from pytest_roseinfer.capabilities.writes import Append, Fill, Prefill, Reservations, Reserve
from pytest_roseinfer.oracle.pages import State, text_token, token_label
from pytest_roseinfer.oracle.texts import explain_equal_token
from tests.capabilities.caches import epoch_caches
from tests.capabilities.caches.epoch_caches import BROKEN, RIGHT, RefusingCache, ResettingCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=2)
ONE_TEXT = ((0, 0),)


def history(*steps: Operation) -> History:
    return History(SPEC, steps, texts=ONE_TEXT)


def oracle_after(*steps: Operation) -> Oracle:
    kinds: tuple[type[State], ...] = (Preempted, Swapped, Reservations)
    states = {kind: kind() for kind in kinds}
    oracle = Oracle(2, 9, branches=ONE_TEXT, states=states)
    for step in steps:
        assert step.possible(oracle)
        step.apply(oracle)
    return oracle


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", RIGHT)
@few_or_many_examples(8, 60)
def test_cache_that_can_be_reset_passes(cache: type[KVCacheAdapter], examples: int) -> None:
    harness_settings.set_current(harness_settings.Settings(examples=examples, steps=20, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("seed_number", range(3))
def test_broken_reset_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, seed_number, lambda each: run_history(broken, each))


def test_tokens_after_a_reset_differ_from_those_before() -> None:
    oracle = oracle_after(Prefill(0, 3))
    old = oracle.tokens(0)
    Reset().apply(oracle)
    assert oracle.text_tokens(0, 3) == [text_token(0, at, epoch=1) for at in range(3)]
    assert oracle.tokens(0) == old
    Append((0,)).apply(oracle)
    assert oracle.tokens(0)[:3] == old
    assert oracle.tokens(0)[3] not in {text_token(0, 3), text_token(0, 3, epoch=1)}
    assert oracle.text_slices([(0, 1), (1, 1)])[0].tokens == [1]
    Prefill(1, 4).apply(oracle)
    assert oracle.tokens(1) == oracle.text_tokens(0, 4)


def test_sequences_with_equal_older_tokens_go_on_equally() -> None:
    oracle = oracle_after(Prefill(0, 3), Prefill(1, 3), Prefill(2, 2), Reset())
    for step in (Append((0, 1, 2)), Append((2,)), Reset(), Append((0, 1))):
        step.apply(oracle)
    assert oracle.tokens(0) == oracle.tokens(1)
    assert oracle.tokens(0)[:2] == oracle.tokens(2)[:2]
    assert oracle.tokens(0)[3] != oracle.tokens(2)[3]


def test_preempted_sequence_is_written_anew() -> None:
    oracle = oracle_after(Prefill(0, 3), Preempt(0), Reset(), Resume(0, 3))
    assert oracle.tokens(0) == oracle.text_tokens(0, 3)
    for step in (Reset(), Append((0,)), Preempt(0), Resume(0, 4)):
        step.apply(oracle)
    assert oracle.tokens(0) == oracle.text_tokens(0, 4)
    assert not oracle.mixes_epochs(0)


def test_swapped_and_reserved_tokens_stay_old() -> None:
    old = [text_token(0, at) for at in range(3)]
    oracle = oracle_after(Prefill(0, 3), SwapOut(0), FinishSwapOut(0), Reset(), SwapIn(0))
    FinishSwapIn(0).apply(oracle)
    assert oracle.tokens(0) == old
    assert oracle.mixes_epochs(0)
    assert oracle_after(Reserve((0,), (3,)), Reset(), Fill()).tokens(0) == old


def test_sequence_without_tokens_has_no_older_ones() -> None:
    oracle = Oracle(2, 9, branches=ONE_TEXT, sequences={0: []})
    Reset().apply(oracle)
    Append((0,)).apply(oracle)
    assert oracle.tokens(0) == oracle.text_tokens(0, 1)


def test_fork_of_older_tokens_is_not_replaced_by_a_copy() -> None:
    oracle = oracle_after(Prefill(0, 3))
    assert Fork(0, 1).without_sharing(oracle) == Copy(0, 1, 3)
    Reset().apply(oracle)
    assert Fork(0, 1).without_sharing(oracle) == Fork(0, 1)


def test_reset_is_refused_while_a_sequence_holds_a_block() -> None:
    oracle = oracle_after(Prefill(0, 1))
    assert Reset().allowed(oracle)
    oracle.states[ResetPolicy] = ResetPolicy(refused_while_held=True)
    assert not Reset().allowed(oracle)
    Free(0).apply(oracle)
    assert Reset().allowed(oracle)
    steps = Prefill(0, 2), Prefill(1, 2), Free(0), Reset()
    run_history(RefusingCache, history(*steps))
    with pytest.raises(Divergence, match="accepted a step that it must refuse"):
        run_history(RefusesNothing, history(*steps))


class RefusesNothing(ResettingCache):
    reset_errors = RefusingCache.reset_errors


def test_refused_reset_changes_no_lookup() -> None:
    steps = history(Prefill(0, 4), Append((1,)), Free(0), Reset())
    with pytest.raises(Divergence, match=r"a refused reset changed the result of match_prefix\(\)"):
        run_history(epoch_caches.ForgetsAndRefuses, steps)


def test_conditions_of_resets_are_counted() -> None:
    steps = Prefill(0, 2), LookUp(1, 2), Reset(), BeginWith(1), Prefill(2, 2), Prefill(3, 2)
    counts = run_history(ResettingCache, history(*steps, Reset()))
    assert counts["reset_of_stored_text"] == 2
    assert counts["text_after_reset"] == counts["reset_after_look_up"] == 1


def test_history_with_a_reset_is_saved_and_described() -> None:
    steps = history(Prefill(0, 2), Reset())
    assert History.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    assert "2. reset the cache" in steps.describe()


def test_messages_name_the_epoch() -> None:
    oracle = oracle_after(Prefill(0, 1), Reset(), Append((0,)), Prefill(1, 2))
    (old, mixed), new = oracle.tokens(0), oracle.tokens(1)
    assert [token_label(each) for each in (old, mixed, new[0])] == [
        "t0.0",
        "t0(epoch 1 after older tokens).1",
        "t0(epoch 1).0",
    ]
    assert describe_token(new[1]) == "text 0 in epoch 1, token 1"
    assert oracle.texts
    assert explain_equal_token(oracle.texts, new[0], old, {old: 0}) == (
        "; both have token id 1, in epoch 1 and in epoch 0; sequence 0 was the first to write it"
    )


class ResetWithoutTexts(PagedCache):
    def reset(self) -> None: ...


def test_reset_without_texts_is_refused() -> None:
    with pytest.raises(TypeError, match="defines reset and must then define use_tokens too"):
        conformance(ResetWithoutTexts)
