"""Cost of planning a step in calls: none per waiting request, few per running one."""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import TYPE_CHECKING

import pytest

from roseinfer.engine.request import Request
from roseinfer.engine.scheduler import queue_lookahead
from tests.engine.scheduler_simulation import SchedulerSimulation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


_CALLS_PER_REQUEST = 20


class Queue(deque[Request]):
    """Queue iterated in Python, so that iterating it counts."""

    def __iter__(self) -> Iterator[Request]:
        for at in range(len(self)):
            yield self[at]


def calls_per_step(simulation: SchedulerSimulation) -> int:
    """Count calls in Python and in C, a cost that needs no clock."""
    calls = 0

    def count_call(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    simulation.scheduler.waiting = Queue(simulation.scheduler.waiting)
    before = sys.getprofile()
    gc.disable()  # Hypothesis has a callback for each collection, whose calls would be counted
    sys.setprofile(count_call)
    try:
        simulation.scheduler.next_step()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def queue_of(
    length: int, policy: str, *, blocks: int, running: int, slots: int
) -> SchedulerSimulation:
    """Build a simulation in which some requests run and the others wait for blocks or a slot."""
    simulation = SchedulerSimulation(
        blocks=blocks, prefill_admission_policy=policy, max_batch_size=running + slots
    )
    for _ in range(running):
        simulation.submit(4, new=100)
    simulation.step()
    for _ in range(length):
        simulation.submit(40)
    return simulation


@pytest.mark.sampled_cases
@pytest.mark.parametrize("policy", ["fifo", "pack"])
@pytest.mark.parametrize(
    ("blocks", "slots"),
    [(17, 100), (10_000, 100), (10_000, 1), (10_000, 0)],
    ids=["no blocks", "many slots", "one slot", "no slot"],
)
def test_step_cost_is_independent_of_queue_length(policy: str, blocks: int, slots: int) -> None:
    costs = []
    for length in (200, 10_000):
        simulation = queue_of(length, policy, blocks=blocks, running=8, slots=slots)
        costs.append([calls_per_step(simulation) for _ in range(3)])
    assert costs[0] == costs[1]
    scheduler = simulation.scheduler
    seen = len(scheduler.running) + queue_lookahead(simulation.config)
    assert max(costs[0]) < _CALLS_PER_REQUEST * seen


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_step_cost_is_linear_in_running_requests(policy: str) -> None:
    costs = [
        calls_per_step(queue_of(0, policy, blocks=10_000, running=running, slots=1))
        for running in (50, 100, 200)
    ]
    assert costs[2] - costs[1] <= 2 * (costs[1] - costs[0]) + 10
    assert costs[2] < 200 * 30
