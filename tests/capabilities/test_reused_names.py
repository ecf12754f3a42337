"""Reused names of freed sequences: no state of the earlier sequence is left."""

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
from pytest_roseinfer.capabilities.payload import describe_token
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
"""Steps after a free from which on a reuse of the name counts as late."""


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(2))
@pytest.mark.parametrize("adapter", [KeepsTheLength, KeepsTheTokens, ForksToTheOldLength])
def test_cache_with_stale_state_fails(adapter: type[KVCacheAdapter], seed_number: int) -> None:
    settings.set_current(settings.Settings(examples=40, steps=12, seed=seed_number))
    with pytest.raises(Divergence) as failure:
        conformance(adapter)().test_histories()
    steps = failure.value.history.operations
    freed = {step.seq for step in steps if isinstance(step, Free)}
    assert freed & set(steps[-1].changed_seqs())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [GroupedManager, DynamicCacheAdapter])
def test_every_step_that_begins_a_sequence_reuses_names(
    adapter: type[KVCacheAdapter],
) -> None:
    soon_reused: Counter[str] = Counter()
    late_reused: Counter[str] = Counter()

    @seed(1)
    @hypothesis_settings(
        max_examples=500,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(adapter, max_steps=20))
    def count(history: History) -> None:
        freed: dict[int, int] = {}
        oracle = Oracle.of(adapter, history.spec)
        for at, step in enumerate(history.operations):
            for seq in step.changed_seqs():
                if seq in freed and seq not in oracle.sequences:
                    kind = type(step).__name__
                    soon_reused[kind] += at - freed[seq] == 1
                    late_reused[kind] += at - freed[seq] >= LATE
            if isinstance(step, Free):
                freed[step.seq] = at
            step.apply(oracle)

    count()
    expected = {"Append", "AppendMany", "Prefill", "Fork"}
    if adapter is GroupedManager:
        expected |= {"AppendPadded", "Reserve"}
    assert set(+soon_reused) == set(+late_reused) == expected


REUSING_STEPS: tuple[Operation, ...] = (
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


@pytest.mark.sampled_cases
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
def test_shipped_adapters_reuse_names_without_stale_state(adapter: type[KVCacheAdapter]) -> None:
    options = {name: values[0] for name, values in adapter.option_choices.items()}
    history = History(replace(SPEC, options=options), REUSING_STEPS)
    for check in (run_history, check_copied, check_permuted, check_split):
        check(adapter, history)


def test_prompt_under_a_reused_name_passes() -> None:
    """A pool without prefix reuse frees blocks when their request ends."""
    steps = (Prefill(0, 5), Free(0), Prefill(0, 3), Append((0,)), Free(0), Append((0,)))
    run_history(UnsharedPagedAttentionCacheAdapter, History(SPEC, steps))


def test_each_life_of_a_name_has_distinct_tokens() -> None:
    oracle = Oracle(block_size=2, capacity=9)
    written: list[int] = []
    for step in REUSING_STEPS:
        if isinstance(step, Append):
            written += oracle.new_tokens(step.rows())
        assert step.apply(oracle)
    assert len(set(written)) == len(written)
    assert oracle.tokens(0) == [token_of(0, 0, life=2)]
    assert oracle.tokens(1) == [token_of(1, 0, life=2)]


def test_refused_prefill_begins_no_life_of_its_name() -> None:
    oracle = Oracle(block_size=2, capacity=1)
    assert not Prefill(0, 3).apply(oracle)
    assert oracle.new_tokens([(0, 1)]) == [token_of(0, 0)]


def test_token_labels_name_sequence_and_life() -> None:
    assert (token_label(token_of(3, 5)), describe_token(token_of(3, 5))) == (
        "3.5",
        "sequence 3, token 5",
    )
    again = token_of(3, 5, life=1)
    assert (token_label(again), describe_token(again)) == (
        "3(life 2).5",
        "sequence 3 (life 2: it was freed or cut before), token 5",
    )
    assert describe_token(padding_token(4)) == "padding row 4"
