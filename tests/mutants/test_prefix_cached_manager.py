"""The prefix cache is driven as the engine drives it, and is right."""

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
    WindowedPrefixes,
)

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=4, num_blocks=2)
ALIKE = ((0, 0), (0, WHOLE), (0, 0))
KEPT = (Prefill(0, 3), Free(0))
"""Of sequence 0 a tail of three tokens is kept."""


def ran(*steps: Operation, spec: CacheSpec = SPEC) -> dict[str, int]:
    return dict(run_history(PrefixCachedManager, History(spec, steps, texts=ALIKE)))


@pytest.mark.parametrize("cache", [PrefixCachedManager, HashedPrefixes, WindowedPrefixes])
def test_any_history_is_right(cache: type[PrefixCachedManager]) -> None:
    @hypothesis_settings(max_examples=20, database=None, phases=[Phase.generate], deadline=None)
    @seed(1)
    @given(histories(cache))
    def look(history: History) -> None:
        run_history(cache, history)

    look()


def test_a_prompt_begins_with_what_is_found() -> None:
    found = ran(Prefill(0, 6), Prefill(1, 6), spec=replace(SPEC, num_blocks=3))
    assert found["block_found"] == 1
    assert "tail_found" not in found
    assert ran(*KEPT, Prefill(1, 4))["tail_found"] == 1


def test_a_prompt_that_has_no_room_beside_a_tail_begins_without_it() -> None:
    assert "tail_found" not in ran(*KEPT, Prefill(1, 8))


def test_a_prompt_comes_in_chunks() -> None:
    assert ran(Prefill(0, 8), Free(0), Prefill(1, 8))["block_found"] == 1


def test_a_preempted_sequence_begins_with_what_is_left_of_it() -> None:
    found = ran(Prefill(0, 7), Preempt(0), Resume(0, 7))
    assert found["block_found"] == 1


def test_room_is_made_by_evicting() -> None:
    assert ran(*KEPT, Prefill(2, 8))["evicted"] == 1


def test_a_tail_that_was_found_is_copied_or_the_append_refused() -> None:
    taken = (*KEPT, LookUp(1, 4), BeginWith(1))
    assert ran(*taken, AppendMany((1,), (2,)), Append((1,)))["tail_found"] == 1
    ran(*taken, Prefill(2, 4), Append((1,)))


class SaysNothingOfTails(PrefixCachedManager):
    prefixes = PrefixCachedManager.prefixes.but(keeps_prefix=False)


def test_that_it_copies_must_be_said() -> None:
    steps = (*KEPT, LookUp(1, 4), BeginWith(1), Prefill(2, 4), Append((1,)))
    with pytest.raises(Divergence, match="refused a write that fits"):
        run_history(SaysNothingOfTails, History(SPEC, steps, texts=ALIKE))
