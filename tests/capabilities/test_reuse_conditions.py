"""Reused handles, slots and lists: their reuse is counted, and must leave no trace."""

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
    CachesIndicesByListIdentity,
    HandsBackAFullHandle,
    LeavesASlotActive,
    PutsTwoInASlot,
    ReusesHandles,
    ReusesLists,
    ReusesSlots,
)
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally


def search(adapter: type[KVCacheAdapter], examples: int, seed_number: int) -> None:
    settings.set_current(settings.Settings(examples=examples, steps=12, seed=seed_number))
    conformance(adapter)().test_histories()


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize(
    ("adapter", "condition"),
    [
        (ReusesHandles, "handle_used_again"),
        (ReusesSlots, "slot_used_again"),
        (ReusesLists, "list_used_again"),
    ],
)
def test_right_cache_passes_and_its_reuse_is_counted(
    adapter: type[KVCacheAdapter], condition: str
) -> None:
    search(adapter, 20, 1)
    assert coverage.current().of(adapter).counts[condition] >= 3


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (HandsBackAFullHandle, "expected|raised"),
        (LeavesASlotActive, "expected|raised"),
        (PutsTwoInASlot, "are kept in slot"),
        (CachesIndicesByListIdentity, "gather: "),
    ],
)
def test_cache_with_stale_state_fails(
    adapter: type[KVCacheAdapter], message: str, seed_number: int
) -> None:
    failure = hunt([adapter], settings.Settings(examples=60, steps=12, seed=seed_number), Tally())
    assert failure
    assert re.search(message, failure.message)


@pytest.mark.parametrize("kind", [GroupedManager, PerLayerManager])
def test_reused_lists_of_the_managers_are_counted(kind: type[KVCacheAdapter]) -> None:
    options = {name: values[0] for name, values in kind.option_choices.items()}
    steps = (Append((0, 1)), Free(0), Fork(1, 0), Free(1), Append((2, 0)), Append((1,)))
    counts = run_history(kind, History(CacheSpec(num_layers=2, options=options), steps))
    assert counts["list_used_again"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_new_lists_are_not_counted_as_reused() -> None:
    class MakesNewLists(ReusesLists):
        def free(self, seq: int) -> None:
            super().free(seq)
            self.spare.clear()

    search(MakesNewLists, 6, 1)
    assert not coverage.current().of(MakesNewLists).counts["list_used_again"]


@pytest.mark.parametrize("name", REUSE_CONDITIONS)
def test_reuse_condition_without_its_method_is_refused(name: str) -> None:
    wrong = type("Wrong", (ListCache,), {"conditions": (name,)})
    message = (
        f"Wrong.conditions names {name!r}: define {REUSE_CONDITIONS[name].method}(), which shows it"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        conformance(wrong)
