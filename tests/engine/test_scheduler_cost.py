"""What planning a step costs the host, in calls: nothing for who waits, little for who runs."""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import TYPE_CHECKING

import pytest

from roseinfer.engine.request import Request
from tests.engine.scheduler_simulation import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Queue(deque[Request]):
    """A queue that is looked at in Python, so that looking at it counts."""

    def __iter__(self) -> Iterator[Request]:
        for at in range(len(self)):
            yield self[at]


def calls_in_a_step(world: World) -> int:
    """Count the calls of Python and of C, a cost that needs no clock."""
    calls = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    world.scheduler.waiting = Queue(world.scheduler.waiting)
    before = sys.getprofile()
    gc.disable()  # Hypothesis has a callback for each collection, whose calls would be counted
    sys.setprofile(note)
    try:
        world.scheduler.next_step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def queue_of(length: int, policy: str, *, blocks: int, running: int, places: int) -> World:
    """Some requests run; the others wait for blocks or for a place."""
    world = World(blocks=blocks, prefill_admission_policy=policy, max_batch_size=running + places)
    for _ in range(running):
        world.submit(4, new=100)
    world.step()
    for _ in range(length):
        world.submit(40)
    return world


@pytest.mark.parametrize("policy", ["fifo", "pack"])
@pytest.mark.parametrize(
    ("blocks", "places"),
    [(17, 100), (10_000, 100), (10_000, 1), (10_000, 0)],
    ids=["no blocks", "room for many", "room for one", "no place"],
)
def test_a_long_queue_costs_no_more_than_a_short_one(policy: str, blocks: int, places: int) -> None:
    costs = []
    for length in (200, 10_000):
        world = queue_of(length, policy, blocks=blocks, running=8, places=places)
        costs.append([calls_in_a_step(world) for _ in range(3)])
    assert costs[0] == costs[1]
    assert max(costs[0]) < 2000


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_the_cost_of_a_step_is_linear_in_those_who_run(policy: str) -> None:
    costs = [
        calls_in_a_step(queue_of(0, policy, blocks=10_000, running=running, places=1))
        for running in (50, 100, 200)
    ]
    assert costs[2] - costs[1] <= 2 * (costs[1] - costs[0]) + 10
    assert costs[2] < 200 * 30
