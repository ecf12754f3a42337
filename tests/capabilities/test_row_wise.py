"""A cache that admits row by row is held to that: the rows ahead of the first refused one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import (
    CacheSpec,
    History,
    KVCacheAdapter,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.counting import harness_conditions_met
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import Append, AppendMany, AppendPadded, Prefill, Reserve
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.row_wise_caches import (
    AdmitsALaterRow,
    BeginsTheRefusedRow,
    ClaimsToBeAtomic,
    LosesTheRowsBefore,
    RowWise,
    SaysNothing,
    StoresTheRefusedRow,
)
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.operation import Operation

TWO_BLOCKS = [Prefill(0, 2), Append((1,))]


def oracle_after(*steps: Operation, atomic: bool = False) -> Oracle:
    """Three blocks of two tokens, of which one is free after ``TWO_BLOCKS``."""
    oracle = Oracle(2, 3, atomic_batches=atomic)
    for step in steps:
        step.apply(oracle)
    return oracle


@pytest.mark.parametrize(
    ("step", "admitted"),
    [
        (Append((0, 1, 2)), Append((0, 1))),
        (Append((1, 0, 2, 3)), Append((1, 0))),
        (Append((0, 2, 1)), Append((0,))),  # row 1 would fit, and comes too late
        (AppendMany((1, 0), (1, 3)), AppendMany((1,), (1,))),
        (AppendMany((0, 1), (3, 1)), None),  # a row is all or nothing
        (AppendPadded((None, 0, None, 2, None)), AppendPadded((None, 0, None))),
        (Append((0, 1)), Append((0, 1))),
        (Reserve((0, 2), (1, 1)), None),
        (Prefill(2, 3), None),
    ],
)
def test_the_rows_ahead_of_the_refused_one_are_stored(
    step: Operation, admitted: Operation | None
) -> None:
    oracle, other = oracle_after(*TWO_BLOCKS), oracle_after(*TWO_BLOCKS)
    assert step.admitted_part(oracle) == admitted
    assert step.apply(oracle) == (step == admitted)
    if admitted:
        admitted.change(other)
    held = {seq: oracle.tokens(seq) for seq in oracle.sequences}
    assert held == {seq: other.tokens(seq) for seq in other.sequences}


def test_an_atomic_cache_stores_none() -> None:
    oracle = oracle_after(*TWO_BLOCKS, atomic=True)
    assert Append((0, 1, 2)).admitted_part(oracle) is None


def test_a_row_that_copies_a_shared_block_is_counted_as_it_comes() -> None:
    oracle = oracle_after(Append((0,)), Fork(0, 1), Prefill(2, 2))
    assert Append((0, 1, 2)).admitted_part(oracle) == Append((0, 1))


def test_what_is_met_is_met_by_the_rows_that_are_stored() -> None:
    step = Append((1, 0, 2))
    expected = {"last_position": 1, "out_of_room_mid_batch": 1}
    assert dict(harness_conditions_met(oracle_after(*TWO_BLOCKS), step)) == expected
    expected.pop("last_position")
    assert dict(harness_conditions_met(oracle_after(*TWO_BLOCKS, atomic=True), step)) == expected


def test_a_history_goes_on_after_rows_were_refused() -> None:
    spec = CacheSpec(block_size=2, num_blocks=3)
    steps = (Append((0, 1)), Append((1, 2, 3, 0)), Append((0, 1, 2)), Append((2,)))
    counts = run_history(RowWise, History(spec, steps))
    assert counts["out_of_room_mid_batch"] == 2


@pytest.mark.usefixtures("short_run")
def test_a_cache_that_is_right_passes() -> None:
    settings.set_current(settings.Settings(examples=24, steps=12, seed=1))
    tests = conformance(RowWise)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    assert coverage.current().of(RowWise).counts["out_of_room_mid_batch"] >= 3


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "adapter",
    [
        StoresTheRefusedRow,
        BeginsTheRefusedRow,
        LosesTheRowsBefore,
        AdmitsALaterRow,
        SaysNothing,
        ClaimsToBeAtomic,
    ],
)
def test_a_cache_that_is_wrong_is_found(adapter: type[KVCacheAdapter], number: int) -> None:
    found = hunt([adapter], settings.Settings(examples=100, steps=12, seed=number), Tally())
    assert found
    assert found.check == "histories"


def test_anything_but_yes_or_no_is_refused() -> None:
    wrong = type("Wrong", (ListCache,), {"atomic_batches": "rows"})
    with pytest.raises(TypeError, match=re.escape("Wrong.atomic_batches is 'rows': write False")):
        conformance(wrong)
