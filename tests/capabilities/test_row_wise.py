"""Caches that admit row by row store exactly the rows before the first refused one."""

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
    RefusesTheWholeBatch,
    ReturnsWithoutRefusing,
    RowWise,
    StoresTheRefusedRow,
)
from tests.capabilities.caches.text_cache import TextCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.operation import Operation

TWO_BLOCKS = [Prefill(0, 2), Append((1,))]


def oracle_after(*steps: Operation, atomic: bool = False) -> Oracle:
    """Return an oracle of three blocks of two tokens; ``TWO_BLOCKS`` leave one of them free."""
    oracle = Oracle(2, 3, atomic_batches=atomic)
    for step in steps:
        step.apply(oracle)
    return oracle


@pytest.mark.parametrize(
    ("step", "admitted"),
    [
        (Append((0, 1, 2)), Append((0, 1))),
        (Append((1, 0, 2, 3)), Append((1, 0))),
        (Append((0, 2, 1)), Append((0,))),  # row 1 would fit, and comes after the refused one
        (AppendMany((1, 0), (1, 3)), AppendMany((1,), (1,))),
        (AppendMany((0, 1), (3, 1)), None),  # a row is all or nothing
        (AppendPadded((None, 0, None, 2, None)), AppendPadded((None, 0, None))),
        (Append((0, 1)), Append((0, 1))),
        (Reserve((0, 2), (1, 1)), None),
        (Prefill(2, 3), None),
    ],
)
def test_rows_before_the_refused_one_are_stored(
    step: Operation, admitted: Operation | None
) -> None:
    oracle, other = oracle_after(*TWO_BLOCKS), oracle_after(*TWO_BLOCKS)
    assert step.admitted_part(oracle) == admitted
    assert step.apply(oracle) == (step == admitted)
    if admitted:
        admitted.change(other)
    stored = {seq: oracle.tokens(seq) for seq in oracle.sequences}
    assert stored == {seq: other.tokens(seq) for seq in other.sequences}


def test_atomic_cache_stores_no_row_of_a_refused_batch() -> None:
    oracle = oracle_after(*TWO_BLOCKS, atomic=True)
    assert Append((0, 1, 2)).admitted_part(oracle) is None


def test_copy_on_write_of_an_earlier_row_takes_room() -> None:
    oracle = oracle_after(Append((0,)), Fork(0, 1), Prefill(2, 2))
    assert Append((0, 1, 2)).admitted_part(oracle) == Append((0, 1))


def test_conditions_are_counted_of_stored_rows_only() -> None:
    step = Append((1, 0, 2))
    expected = {"last_position": 1, "out_of_room_mid_batch": 1}
    assert dict(harness_conditions_met(oracle_after(*TWO_BLOCKS), step)) == expected
    expected.pop("last_position")
    assert dict(harness_conditions_met(oracle_after(*TWO_BLOCKS, atomic=True), step)) == expected


def test_history_continues_after_refused_rows() -> None:
    spec = CacheSpec(block_size=2, num_blocks=3)
    steps = (Append((0, 1)), Append((1, 2, 3, 0)), Append((0, 1, 2)), Append((2,)))
    counts = run_history(RowWise, History(spec, steps))
    assert counts["out_of_room_mid_batch"] == 2


@pytest.mark.usefixtures("short_run")
def test_right_row_wise_cache_passes() -> None:
    settings.set_current(settings.Settings(examples=24, steps=12, seed=1))
    tests = conformance(RowWise)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    tests.test_one_batch_equals_its_split_in_two()
    assert coverage.current().of(RowWise).counts["out_of_room_mid_batch"] >= 3


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize(
    "adapter",
    [
        StoresTheRefusedRow,
        BeginsTheRefusedRow,
        RefusesTheWholeBatch,
        AdmitsALaterRow,
        ReturnsWithoutRefusing,
        ClaimsToBeAtomic,
    ],
)
def test_broken_row_wise_cache_fails(adapter: type[KVCacheAdapter], seed_number: int) -> None:
    failure = hunt([adapter], settings.Settings(examples=100, steps=12, seed=seed_number), Tally())
    assert failure
    assert failure.check == "histories"


def test_non_boolean_atomic_batches_is_refused() -> None:
    wrong = type("Wrong", (ListCache,), {"atomic_batches": "rows"})
    with pytest.raises(TypeError, match=re.escape("Wrong.atomic_batches is 'rows': write False")):
        conformance(wrong)


def test_histories_with_prefixes_are_drawn() -> None:
    """No prompt is known to exceed the capacity, and a search for the shortest one had no end."""

    class RowWiseTexts(TextCache):
        atomic_batches = False

    drawn: list[History] = []
    check_drawn_histories(RowWiseTexts, 60, 1, drawn.append)
    assert len(drawn) >= 60
