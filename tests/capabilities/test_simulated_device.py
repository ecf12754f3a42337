"""Torch operations are held back as a GPU would, and caches that do not wait for them are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from pytest_roseinfer.run import coverage
from tests.capabilities.caches.queued_torch_caches import BROKEN, CopiesOutBeside, TorchOnAQueue
from tests.capabilities.test_device_queue import search

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


@pytest.fixture
def queue() -> DeviceQueue:
    return DeviceQueue()


def on_device(queue: DeviceQueue, *numbers: float) -> torch.Tensor:
    made = torch.tensor(numbers, dtype=torch.float32)
    queue.on_device(made)
    return made


def held(tensor: torch.Tensor) -> list[float]:
    """Return what is in memory now, past the queue."""
    return tensor.view(-1).numpy().tolist()  # type: ignore[no-any-return]


def test_writes_and_results_come_later(queue: DeviceQueue) -> None:
    cache = on_device(queue, 1, 2, 3)
    with QueuedTorch(queue):
        cache[1:].add_(10)
        total = cache.sum() * 2
        row = cache.view(3, 1)[2]
    assert held(cache) == [1, 2, 3]
    assert held(row) == [3]
    assert total.isnan()
    queue.run(1)
    assert held(cache) == [1, 12, 13]
    assert held(row) == [13]
    queue.finish()
    assert total == 52


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_made_of_several_operations_comes_later(
    queue: DeviceQueue, *, inference: bool
) -> None:
    """Some make a view where they can, and else a copy."""
    table = on_device(queue, 1, 2, 3, 4).view(2, 2)
    with torch.inference_mode(inference), QueuedTorch(queue):
        table.add_(10)
        turned, same = table.t().reshape(4), table.reshape(4)
        summed = torch.einsum("ij->i", table)
    queue.finish()
    assert held(turned) == [11, 13, 12, 14]
    assert held(same) == [11, 12, 13, 14]
    assert held(summed) == [23, 27]


@pytest.mark.parametrize("read", ["tolist", "item", "cpu", "numpy", "__bool__", "nonzero"])
def test_the_host_waits_for_what_it_reads(queue: DeviceQueue, read: str) -> None:
    cache = on_device(queue, 1)
    with QueuedTorch(queue):
        getattr(cache.add_(1), read)()
        assert queue.query()


def test_pinned_memory_is_read_late_and_other_memory_at_once(queue: DeviceQueue) -> None:
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
    assert [held(each) for each in caches] == [[7], [1], [1], [7]]


def test_a_copy_to_the_host_arrives_when_it_runs(queue: DeviceQueue) -> None:
    cache, late, now = on_device(queue, 1), torch.zeros(1), torch.zeros(1)
    with QueuedTorch(queue):
        cache.add_(1)
        late.copy_(cache, non_blocking=True)
        assert held(late) == [0]
        now.copy_(cache)
    assert (held(late), held(now)) == ([2], [2])


def test_what_the_device_writes_to_is_its_own(queue: DeviceQueue) -> None:
    cache, made = on_device(queue, 1, 2), torch.zeros(2)
    with QueuedTorch(queue):
        made.index_copy_(0, torch.tensor([1, 0]), cache)
        assert queue.is_on_device(made)
        largest, at = made.max(0)
        torch.add(made, 1, out=cache)
    assert held(made) == [0, 0]
    queue.finish()
    assert (held(made), held(cache)) == ([2, 1], [3, 2])
    assert (largest.item(), at.item()) == (2, 0)


def test_operations_go_to_the_stream_that_is_used(queue: DeviceQueue) -> None:
    cache, other = on_device(queue, 1), queue.new_stream()
    with QueuedTorch(queue):
        cache.add_(1)
        with queue.using(other):
            copied = cache.clone()
            other.synchronize()
    assert held(copied) == [1]
    queue.finish()
    assert held(cache) == [2]


def test_other_tensors_are_computed_at_once(queue: DeviceQueue) -> None:
    with QueuedTorch(queue):
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert not queue.num_submitted


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", [TorchOnAQueue, CopiesOutBeside])
def test_a_cache_that_waits_passes(cache: type[KVCacheAdapter]) -> None:
    assert search(cache, 1, examples=12) is None
    assert coverage.current().of(cache).counts["calls_in_flight"] > 10


@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_one_that_does_not_wait_is_found(broken: type[KVCacheAdapter], number: int) -> None:
    assert search(broken, number)
