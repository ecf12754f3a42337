"""A name that was freed is used again, soon and late, and what was its sequence's is not found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.payload import token_words
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.pages import padding_token, token_label, token_of
from pytest_roseinfer.run.metamorphic import check_copied, check_permuted, check_split
from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter
from pytest_roseinfer.targets.paged_attention_cache import (
    ForkedPagedAttentionCacheAdapter,
    UnsharedPagedAttentionCacheAdapter,
)
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, PerLayerManager
from tests.capabilities.caches.stale_caches import (
    ForksToTheOldLength,
    KeepsTheLength,
    KeepsTheTokens,
)
from tests.interpreted import interpreted
from tests.mutants.kernel_caches import CompactedKernels

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(num_layers=2, num_heads=2, block_size=2, num_blocks=12)
LATE = 3
"""Steps between a free and a use of the name that is no longer soon."""


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("adapter", [KeepsTheLength, KeepsTheTokens, ForksToTheOldLength])
def test_a_cache_that_remembers_is_found(adapter: type[KVCacheAdapter], number: int) -> None:
    settings.set_current(settings.Settings(examples=40, steps=12, seed=number))
    with pytest.raises(Divergence) as failure:
        conformance(adapter)().test_histories()
    steps = failure.value.history.operations
    freed = {step.seq for step in steps if isinstance(step, Free)}
    assert freed & set(steps[-1].changed_seqs())


@pytest.mark.many_alike
@pytest.mark.parametrize("adapter", [GroupedManager, DynamicCacheAdapter])
def test_every_step_that_begins_a_sequence_takes_such_names(
    adapter: type[KVCacheAdapter],
) -> None:
    soon: Counter[str] = Counter()
    late: Counter[str] = Counter()

    @seed(1)
    @hypothesis_settings(
        max_examples=500,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(adapter, most_steps=20))
    def note(history: History) -> None:
        freed: dict[int, int] = {}
        oracle = Oracle.of(adapter, history.spec)
        for at, step in enumerate(history.operations):
            for seq in step.changed_seqs():
                if seq in freed and seq not in oracle.sequences:
                    kind = type(step).__name__
                    soon[kind] += at - freed[seq] == 1
                    late[kind] += at - freed[seq] >= LATE
            if isinstance(step, Free):
                freed[step.seq] = at
            step.apply(oracle)

    note()
    expected = {"Append", "AppendMany", "Prefill", "Fork"}
    if adapter is GroupedManager:
        expected |= {"AppendPadded", "Reserve"}
    assert set(+soon) == set(+late) == expected


LIVES: tuple[Operation, ...] = (
    *[Append((0, 1))] * 3,
    Free(0),
    Append((1, 0)),
    Free(1),
    Fork(0, 1),
    Append((1, 0)),
    Append((1, 0)),
    Free(0),
    Free(1),
    Append((1, 0)),
)


@pytest.mark.parametrize(
    "adapter",
    [
        GroupedManager,
        PerLayerManager,
        pytest.param(CompactedKernels, marks=interpreted),
        DynamicCacheAdapter,
        ForkedPagedAttentionCacheAdapter,
    ],
)
def test_shipped_adapters_begin_anew(adapter: type[KVCacheAdapter]) -> None:
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    history = History(replace(SPEC, options=options), LIVES)
    for check in (run_history, check_copied, check_permuted, check_split):
        check(adapter, history)


def test_a_prompt_under_a_name_whose_request_ended() -> None:
    """Without sharing between prompts, blocks go back to the pool as their request ends."""
    steps = (Prefill(0, 5), Free(0), Prefill(0, 3), Append((0,)), Free(0), Append((0,)))
    run_history(UnsharedPagedAttentionCacheAdapter, History(SPEC, steps))


def test_each_life_writes_tokens_of_its_own() -> None:
    oracle = Oracle(block_size=2, capacity=9)
    written: list[int] = []
    for step in LIVES:
        if isinstance(step, Append):
            written += oracle.new_tokens(step.rows())
        assert step.apply(oracle)
    assert len(set(written)) == len(written)
    assert oracle.tokens(0) == [token_of(0, 0, life=2)]
    assert oracle.tokens(1) == [token_of(1, 0, life=2)]


def test_a_name_that_found_no_room_has_had_no_life() -> None:
    oracle = Oracle(block_size=2, capacity=1)
    assert not Prefill(0, 3).apply(oracle)
    assert oracle.new_tokens([(0, 1)]) == [token_of(0, 0)]


def test_tokens_say_whose_they_are() -> None:
    assert (token_label(token_of(3, 5)), token_words(token_of(3, 5))) == (
        "3.5",
        "sequence 3, token 5",
    )
    again = token_of(3, 5, life=1)
    assert (token_label(again), token_words(again)) == (
        "3(life 2).5",
        "sequence 3 (life 2: it was freed or cut before), token 5",
    )
    assert token_words(padding_token(4)) == "padding row 4"
