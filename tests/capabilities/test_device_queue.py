"""Caches whose device works later than it is asked are found where they do not wait for it."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, conformance, run_history, settings
from pytest_roseinfer.capabilities.device_queue import Read, RunQueued
from pytest_roseinfer.capabilities.simulated_device import DeviceQueue, Event
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.broken_queued_caches import (
    BROKEN,
    ReadsBeforeItIsThere,
    ReusesTheBufferEarly,
)
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.queued_cache import QueuedCache
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


def search(adapter: type[KVCacheAdapter], number: int, examples: int = 200) -> str | None:
    found = hunt([adapter], settings.Settings(examples=examples, steps=14, seed=number), Tally())
    return found.what if found else None


def test_calls_run_in_order_and_when_they_are_told_to() -> None:
    queue, made = DeviceQueue(), list[int]()
    for number in range(4):
        queue.submit(partial(made.append, number))
    assert (made, queue.in_flight) == ([], 4)
    queue.run(1)
    assert made == [0]
    behind = queue.record_event()
    queue.submit(lambda: made.append(9))
    assert not behind.query()
    behind.synchronize()
    assert (made, behind.query(), queue.in_flight) == ([0, 1, 2, 3], True, 1)
    queue.run(100, stream=5)
    assert made == [0, 1, 2, 3, 9]


def test_a_stream_waits_for_another_where_it_says_so() -> None:
    queue, made = DeviceQueue(), list[str]()
    other = queue.new_stream()
    queue.submit(lambda: made.append("first"))
    other.submit(lambda: made.append("beside it"))
    other.wait_event(queue.record_event())
    other.submit(lambda: made.append("behind it"))
    queue.submit(lambda: made.append("last"))
    other.synchronize()
    assert made == ["beside it", "first", "behind it"]
    queue.finish()
    assert made[3:] == ["last"]


def test_an_event_that_was_never_recorded_is_reached() -> None:
    event = Event()
    assert event.query()
    event.synchronize()
    queue = DeviceQueue()
    queue.wait_event(event)
    queue.finish()


@pytest.mark.usefixtures("short_run")
def test_a_cache_that_waits_passes_and_is_seen_with_calls_in_flight() -> None:
    assert search(QueuedCache, 1, examples=40) is None
    assert coverage.current().of(QueuedCache).counts["calls_in_flight"] > 50


class NeverSubmits(PagedCache):
    def use_queue(self, queue: DeviceQueue) -> None: ...


@pytest.mark.usefixtures("short_run")
def test_a_queue_that_is_left_alone_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 3)
    settings.set_current(settings.Settings(examples=3, seed=1, require_paths=False))
    conformance(NeverSubmits)().test_histories()
    problems = TargetVerdict(coverage.current().of(NeverSubmits)).problems(require_paths=True)
    assert any("'calls_in_flight' was never reached" in line for line in problems)


def test_what_the_device_does_is_saved_and_said() -> None:
    history = History(CacheSpec(), (Append((0,)), RunQueued(2, 1), Read()))
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "the device makes the next 2 calls of stream 1" in history.describe()


@pytest.mark.parametrize("broken", [ReusesTheBufferEarly, ReadsBeforeItIsThere])
def test_a_history_without_device_steps_is_read_at_its_end(broken: type[KVCacheAdapter]) -> None:
    steps = tuple(Append((seq,)) for seq in range(5))
    run_history(QueuedCache, History(CacheSpec(), steps))
    with pytest.raises(Divergence):
        run_history(broken, History(CacheSpec(), steps))


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_one_that_does_not_wait_is_found(broken: type[KVCacheAdapter], number: int) -> None:
    found = search(broken, number)
    assert found
    assert re.search("expected|raised|differs", found)
