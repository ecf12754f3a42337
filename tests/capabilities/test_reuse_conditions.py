"""Handles, slots and lists that a cache gives out again are counted, and must be as new."""

from __future__ import annotations

import re

import pytest

from pytest_roseinfer import (
    CacheSpec,
    History,
    KVCacheAdapter,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.cache_data import REUSE_CONDITIONS
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.targets.roseinfer_kv import GroupedManager, PerLayerManager
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.reusing_caches import (
    HandsBackAFullHandle,
    KnowsListsByIdentity,
    LeavesASlotActive,
    PutsTwoInASlot,
    ReusesHandles,
    ReusesLists,
    ReusesSlots,
)
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally


def search(adapter: type[KVCacheAdapter], examples: int, number: int) -> None:
    settings.set_current(settings.Settings(examples=examples, steps=12, seed=number))
    conformance(adapter)().test_histories()


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    ("adapter", "condition"),
    [
        (ReusesHandles, "handle_used_again"),
        (ReusesSlots, "slot_used_again"),
        (ReusesLists, "list_used_again"),
    ],
)
def test_a_cache_that_is_right_passes_and_is_seen_to_use_them_again(
    adapter: type[KVCacheAdapter], condition: str
) -> None:
    search(adapter, 20, 1)
    assert coverage.current().of(adapter).counts[condition] >= 3


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (HandsBackAFullHandle, "expected|raised"),
        (LeavesASlotActive, "expected|raised"),
        (PutsTwoInASlot, "are kept in slot"),
        (KnowsListsByIdentity, "gather: "),
    ],
)
def test_a_cache_that_remembers_is_found(
    adapter: type[KVCacheAdapter], said: str, number: int
) -> None:
    found = hunt([adapter], settings.Settings(examples=60, steps=12, seed=number), Tally())
    assert found
    assert re.search(said, found.what)


@pytest.mark.parametrize("kind", [GroupedManager, PerLayerManager])
def test_the_lists_of_the_managers_are_used_again(kind: type[KVCacheAdapter]) -> None:
    options = {name: values[0] for name, values in kind.option_choices.items()}
    steps = (Append((0, 1)), Free(0), Fork(1, 0), Free(1), Append((2, 0)), Append((1,)))
    counts = run_history(kind, History(CacheSpec(num_layers=2, options=options), steps))
    assert counts["list_used_again"] == 2


@pytest.mark.usefixtures("short_run")
def test_new_things_are_not_taken_for_old_ones() -> None:
    class MakesNewLists(ReusesLists):
        def free(self, seq: int) -> None:
            super().free(seq)
            self.spare.clear()

    search(MakesNewLists, 6, 1)
    assert not coverage.current().of(MakesNewLists).counts["list_used_again"]


@pytest.mark.parametrize("name", REUSE_CONDITIONS)
def test_what_nothing_shows_cannot_be_demanded(name: str) -> None:
    wrong = type("Wrong", (ListCache,), {"conditions": (name,)})
    says = (
        f"Wrong.conditions names {name!r}: define {REUSE_CONDITIONS[name].method}(), which shows it"
    )
    with pytest.raises(TypeError, match=re.escape(says)):
        conformance(wrong)
