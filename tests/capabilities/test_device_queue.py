"""Caches whose device runs calls later fail where they do not wait for it."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_roseinfer import CacheSpec, Divergence, History, conformance, run_history, settings
from pytest_roseinfer.capabilities.device_queue import Read, RunQueued, free_in_flight
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.payload import LAYOUTS
from pytest_roseinfer.capabilities.simulated_device import DeviceQueue, Event
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import _Writer
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.broken_queued_caches import (
    BROKEN,
    ReadsBeforeTheCopy,
    ReusesTheBufferEarly,
)
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.queued_cache import QueuedCache
from tests.mutants.hunt import hunt
from tests.mutants.tally import Tally

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


def search(adapter: type[KVCacheAdapter], seed_number: int, examples: int = 200) -> str | None:
    finding = hunt(
        [adapter], settings.Settings(examples=examples, steps=14, seed=seed_number), Tally()
    )
    return finding.message if finding else None


def test_queued_calls_run_in_order_and_on_demand() -> None:
    queue, calls = DeviceQueue(), list[int]()
    for index in range(4):
        queue.submit(partial(calls.append, index))
    assert (calls, queue.in_flight) == ([], 4)
    queue.run(1)
    assert calls == [0]
    event = queue.record_event()
    queue.submit(lambda: calls.append(9))
    assert not event.query()
    event.synchronize()
    assert (calls, event.query(), queue.in_flight) == ([0, 1, 2, 3], True, 1)
    queue.run(100, stream=5)
    assert calls == [0, 1, 2, 3, 9]


def test_stream_waits_for_an_event_of_another_stream() -> None:
    queue, calls = DeviceQueue(), list[str]()
    other = queue.new_stream()
    queue.submit(lambda: calls.append("first"))
    other.submit(lambda: calls.append("independent"))
    other.wait_event(queue.record_event())
    other.submit(lambda: calls.append("after the wait"))
    queue.submit(lambda: calls.append("last"))
    other.synchronize()
    assert calls == ["independent", "first", "after the wait"]
    queue.finish()
    assert calls[3:] == ["last"]


def test_unrecorded_event_is_complete() -> None:
    event = Event()
    assert event.query()
    event.synchronize()
    queue = DeviceQueue()
    queue.wait_event(event)
    queue.finish()


@pytest.mark.usefixtures("short_run")
def test_cache_that_waits_passes_with_calls_in_flight() -> None:
    assert search(QueuedCache, 1, examples=40) is None
    assert coverage.current().of(QueuedCache).counts["calls_in_flight"] > 50


class NeverSubmits(PagedCache):
    def use_queue(self, queue: DeviceQueue) -> None: ...


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_unused_queue_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 3)
    settings.set_current(settings.Settings(examples=3, seed=1, require_paths=False))
    conformance(NeverSubmits)().test_histories()
    problems = TargetVerdict(coverage.current().of(NeverSubmits)).problems(require_paths=True)
    assert any("'calls_in_flight' was never reached" in line for line in problems)


@given(data=st.data())
def test_sequence_that_found_no_room_is_not_freed(data: st.DataObject) -> None:
    full = CacheSpec(block_size=1, num_blocks=1)
    draw: Any = data.draw
    writer = _Writer(draw, QueuedCache, Oracle.of(QueuedCache, full), LAYOUTS)
    writer.take(Append(writer.fresh(1)))
    free_in_flight(writer)
    assert not any(isinstance(step, Free) for step in writer.steps)


def test_device_steps_are_saved_and_described() -> None:
    history = History(CacheSpec(), (Append((0,)), RunQueued(2, 1), Read()))
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert "the device makes the next 2 calls of stream 1" in history.describe()


@pytest.mark.parametrize("broken", [ReusesTheBufferEarly, ReadsBeforeTheCopy])
def test_history_without_device_steps_is_read_at_its_end(broken: type[KVCacheAdapter]) -> None:
    steps = tuple(Append((seq,)) for seq in range(5))
    run_history(QueuedCache, History(CacheSpec(), steps))
    with pytest.raises(Divergence):
        run_history(broken, History(CacheSpec(), steps))


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_cache_that_does_not_wait_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    message = search(broken, seed_number)
    assert message
    assert re.search("expected|raised|differs", message)
