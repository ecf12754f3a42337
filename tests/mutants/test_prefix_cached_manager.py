"""The prefix cache without a model: right histories, hits, evictions and tails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.preemption import Preempt, Resume
from pytest_roseinfer.capabilities.prefixes import BeginWith, LookUp
from pytest_roseinfer.capabilities.writes import Append, AppendMany, Prefill
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.texts import WHOLE
from tests.mutants.prefix_cached_manager import (
    HashedPrefixes,
    PrefixCachedManager,
    ResetPrefixes,
    WindowedPrefixes,
)

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=4, num_blocks=2)
TEXTS = ((0, 0), (0, WHOLE), (0, 0))
CACHE_A_TAIL = (Prefill(0, 3), Free(0))
"""Steps after which a tail of three tokens is cached."""


def run_steps(*steps: Operation, spec: CacheSpec = SPEC) -> dict[str, int]:
    return dict(run_history(PrefixCachedManager, History(spec, steps, texts=TEXTS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [PrefixCachedManager, HashedPrefixes, WindowedPrefixes, ResetPrefixes]
)
def test_histories_are_right(cache: type[PrefixCachedManager]) -> None:
    @hypothesis_settings(max_examples=20, database=None, phases=[Phase.generate], deadline=None)
    @seed(1)
    @given(histories(cache))
    def check(history: History) -> None:
        run_history(cache, history)

    check()


def test_prompt_begins_with_cached_blocks_and_tails() -> None:
    counts = run_steps(Prefill(0, 6), Prefill(1, 6), spec=replace(SPEC, num_blocks=3))
    assert counts["block_found"] == 1
    assert "tail_found" not in counts
    assert run_steps(*CACHE_A_TAIL, Prefill(1, 4))["tail_found"] == 1


def test_prompt_without_room_for_a_tail_copy_starts_without_it() -> None:
    assert "tail_found" not in run_steps(*CACHE_A_TAIL, Prefill(1, 8))


def test_prompt_is_stored_in_chunks() -> None:
    assert run_steps(Prefill(0, 8), Free(0), Prefill(1, 8))["block_found"] == 1


def test_preempted_sequence_resumes_with_its_cached_blocks() -> None:
    counts = run_steps(Prefill(0, 7), Preempt(0), Resume(0, 7))
    assert counts["block_found"] == 1


def test_prompt_evicts_cached_blocks() -> None:
    assert run_steps(*CACHE_A_TAIL, Prefill(2, 8))["evicted"] == 1


def test_cached_tail_is_copied_or_the_append_is_refused() -> None:
    steps = (*CACHE_A_TAIL, LookUp(1, 4), BeginWith(1))
    assert run_steps(*steps, AppendMany((1,), (2,)), Append((1,)))["tail_found"] == 1
    run_steps(*steps, Prefill(2, 4), Append((1,)))


class WithoutTailCopies(PrefixCachedManager):
    prefixes = PrefixCachedManager.prefixes.but(keeps_prefix=False)


def test_undeclared_copy_of_a_tail_is_found() -> None:
    steps = (*CACHE_A_TAIL, LookUp(1, 4), BeginWith(1), Prefill(2, 4), Append((1,)))
    with pytest.raises(Divergence, match="refused a write that fits"):
        run_history(WithoutTailCopies, History(SPEC, steps, texts=TEXTS))
