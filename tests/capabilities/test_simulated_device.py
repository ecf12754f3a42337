"""Simulated device: torch operations run late, and caches that do not wait for them fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.queued_torch_caches import (
    BROKEN,
    GathersOnAnotherStream,
    TorchOnAQueue,
)
from tests.capabilities.caches.stored_caches import BROKEN as BROKEN_STORES
from tests.capabilities.caches.stored_caches import StoredCache
from tests.capabilities.test_device_queue import search

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


@pytest.fixture
def queue() -> DeviceQueue:
    return DeviceQueue()


def on_device(queue: DeviceQueue, *numbers: float) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    queue.on_device(tensor)
    return tensor


def memory_of(tensor: torch.Tensor) -> list[float]:
    """Return the values that are in memory now, whatever is queued."""
    return tensor.view(-1).numpy().tolist()  # type: ignore[no-any-return]


def test_writes_and_results_are_deferred(queue: DeviceQueue) -> None:
    cache = on_device(queue, 1, 2, 3)
    with QueuedTorch(queue):
        cache[1:].add_(10)
        total = cache.sum() * 2
        row = cache.view(3, 1)[2]
    assert memory_of(cache) == [1, 2, 3]
    assert memory_of(row) == [3]
    assert total.isnan()
    queue.run(1)
    assert memory_of(cache) == [1, 12, 13]
    assert memory_of(row) == [13]
    queue.finish()
    assert total == 52


@pytest.mark.parametrize("inference", [False, True])
def test_composite_operations_are_deferred(queue: DeviceQueue, *, inference: bool) -> None:
    """Some operations return a view where they can, and a copy otherwise."""
    table = on_device(queue, 1, 2, 3, 4).view(2, 2)
    with torch.inference_mode(inference), QueuedTorch(queue):
        table.add_(10)
        transposed, viewed = table.t().reshape(4), table.reshape(4)
        summed = torch.einsum("ij->i", table)
    queue.finish()
    assert memory_of(transposed) == [11, 13, 12, 14]
    assert memory_of(viewed) == [11, 12, 13, 14]
    assert memory_of(summed) == [23, 27]


@pytest.mark.parametrize("read", ["tolist", "item", "cpu", "numpy", "__bool__", "nonzero"])
def test_host_reads_wait_for_the_queue(queue: DeviceQueue, read: str) -> None:
    cache = on_device(queue, 1)
    with QueuedTorch(queue):
        getattr(cache.add_(1), read)()
        assert queue.query()


def test_pinned_memory_is_read_late_and_pageable_memory_at_once(queue: DeviceQueue) -> None:
    pinned, other = torch.ones(1), torch.ones(1)
    queue.pinned(pinned)
    caches = [on_device(queue, 0) for _ in range(4)]
    with QueuedTorch(queue):
        caches[0].copy_(pinned, non_blocking=True)
        caches[1].copy_(other, non_blocking=True)
        caches[2].add_(other)
        pinned.fill_(7)
        other.fill_(7)
        assert queue.in_flight == 3
        caches[3].copy_(pinned)
    assert queue.query()
    assert [memory_of(each) for each in caches] == [[7], [1], [1], [7]]


def test_copy_to_the_host_arrives_when_it_runs(queue: DeviceQueue) -> None:
    cache, late, now = on_device(queue, 1), torch.zeros(1), torch.zeros(1)
    with QueuedTorch(queue):
        cache.add_(1)
        late.copy_(cache, non_blocking=True)
        assert memory_of(late) == [0]
        now.copy_(cache)
    assert (memory_of(late), memory_of(now)) == ([2], [2])


def test_tensor_written_by_the_device_is_on_the_device(queue: DeviceQueue) -> None:
    cache, target = on_device(queue, 1, 2), torch.zeros(2)
    with QueuedTorch(queue):
        target.index_copy_(0, torch.tensor([1, 0]), cache)
        assert queue.is_on_device(target)
        largest, at = target.max(0)
        torch.add(target, 1, out=cache)
    assert memory_of(target) == [0, 0]
    queue.finish()
    assert (memory_of(target), memory_of(cache)) == ([2, 1], [3, 2])
    assert (largest.item(), at.item()) == (2, 0)


def test_operations_go_to_the_current_stream(queue: DeviceQueue) -> None:
    cache, other = on_device(queue, 1), queue.new_stream()
    with QueuedTorch(queue):
        cache.add_(1)
        with queue.using(other):
            copied = cache.clone()
            other.synchronize()
    assert memory_of(copied) == [1]
    queue.finish()
    assert memory_of(cache) == [2]


def test_host_tensors_are_computed_at_once(queue: DeviceQueue) -> None:
    with QueuedTorch(queue):
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert not queue.num_submitted


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", [TorchOnAQueue, GathersOnAnotherStream, StoredCache])
def test_cache_that_waits_for_the_device_passes(cache: type[KVCacheAdapter]) -> None:
    assert search(cache, 1, examples=12) is None
    assert coverage.current().of(cache).counts["calls_in_flight"] > 10


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("broken", [*BROKEN, *BROKEN_STORES], ids=lambda cache: cache.__name__)
def test_cache_that_does_not_wait_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    assert search(broken, seed_number)
