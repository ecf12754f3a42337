"""Starvation: order of admission in a full cache and with long prompts.

Before each step runs, the test checks for each waiting request if it could have started, given what
the requests before it took, unless one of these may be skipped no more. These counts share no code
with the scheduler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.scheduler_simulation import SchedulerSimulation

if TYPE_CHECKING:
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step

MAX_SKIPS = 8
"""Steps that had room for a request and in which it waited all the same."""


class StarvationSimulation(SchedulerSimulation):
    """Simulation that counts how long requests wait that could start."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.could_start: Counter[int] = Counter()
        """Steps with room for each request in which it waited, by id."""
        self.waited: Counter[int] = Counter()
        """The same, for steps in which no request before it had reached the limit of skips."""
        self.overtaken: Counter[int] = Counter()
        """Later requests that were admitted before each waiting one, by id."""

    def _check_limits(self, step: Step) -> None:
        super()._check_limits(step)
        first_come = self.config.prefill_admission_policy == "fifo"
        admitted = [
            each for each, _ in step.chunks if each.sequence.num_stored == each.num_cached_tokens
        ]
        for at, request in enumerate(self.scheduler.waiting):
            later = [each for each in admitted if each.id > request.id]
            self.overtaken[request.id] += len(later)
            if first_come:
                assert not later, f"{later[0].id} was admitted before {request.id}, which waits"
                assert at or not self._could_start(request, later, step), (
                    "first request waits despite room"
                )
                continue
            earlier = list(self.scheduler.waiting)[:at]
            could_start = self._could_start(request, later, step)
            self.could_start[request.id] += could_start
            self.waited[request.id] += could_start and all(
                e.times_skipped < MAX_SKIPS for e in earlier
            )
            overtaken = self.overtaken[request.id]
            assert self.waited[request.id] <= MAX_SKIPS, f"{request.id} waits despite room"
            assert overtaken <= MAX_SKIPS, f"{request.id} is overtaken too often"
            assert request.times_skipped <= self.could_start[request.id] + overtaken, (
                "too many skips counted"
            )

    def _could_start(self, request: Request, later: list[Request], step: Step) -> bool:
        """Return True if the request had room at its turn, before later requests got theirs."""
        config, size = self.config, self.block_allocator.size
        earlier = [(each, count) for each, count in step.chunks if each not in later]
        tokens = config.max_prompt_tokens - sum(count for _, count in earlier)
        length = len(request.sequence.token_ids)
        if not config.chunked_prefill and earlier and length > tokens:
            return False
        slots = config.max_batch_size - len(self.scheduler.running) + len(later)
        if min(tokens, slots, config.prefill_max_batch_size - len(earlier)) < 1:
            return False
        running = [each for each in self.scheduler.running.values() if each not in later]
        blocks = self.block_allocator.available + sum(
            len(each.sequence.block_lists[0]) for each in later
        )
        blocks -= sum(
            self.block_allocator.count_needed_blocks(each.sequence, each.num_unstored)
            for each in running
        )
        cached = min(self.block_allocator.cached.get(request.id, 0), length - 1)
        return -(-length // size) + (cached % size > 0) <= blocks


@dataclass(frozen=True)
class Wave:
    """Equal requests that arrive together."""

    after: int
    """Steps since the previous wave."""
    count: int
    prompt: int
    new: int
    cached: int
    paused: int = 0
    """Steps after which the first of them is paused for as many, if it still runs; 0 if never."""


waves = st.lists(
    st.builds(
        Wave,
        after=st.sampled_from([0, 1, 1, 2, 4]),
        count=st.sampled_from([1, 1, 2, 4]),
        prompt=st.sampled_from([1, 2, 5, 12, 30, 60]),
        new=st.sampled_from([1, 2, 5, 12]),
        cached=st.sampled_from([0, 0, 3, 8]),
        paused=st.sampled_from([0, 0, 2, 5]),
    ),
    min_size=2,
    max_size=25,
)
limits = st.fixed_dictionaries(
    {
        "max_batch_size": st.sampled_from([2, 4, 64]),
        "prefill_max_batch_size": st.sampled_from([1, 2, 16]),
        "prefill_max_tokens": st.sampled_from([4, 16, 40]),
        "chunked_prefill": st.sampled_from([True, True, False]),
        "size": st.sampled_from([1, 4]),
    }
)
STARVED_BY_PACKING = [Wave(0, 1, 60, 1, 0), *[Wave(1, 1, 12, 1, 0), Wave(0, 1, 30, 1, 0)] * 12]


@pytest.mark.parametrize("policy", ["fifo", "pack"])
@settings(max_examples=80, deadline=None, database=None)
@given(waves, limits, st.sampled_from([0, 0, 4, 40]))
@example(STARVED_BY_PACKING, {"prefill_max_tokens": 16, "size": 4}, 40)
def test_no_request_starves(
    policy: str, history: list[Wave], limits: dict[str, Any], spare: int
) -> None:
    """The cache fits the largest request, or some more tokens."""
    largest = max(each.prompt + each.new for each in history) + spare
    blocks = -(-largest // limits["size"])
    simulation = StarvationSimulation(blocks=blocks, prefill_admission_policy=policy, **limits)
    scheduled: list[tuple[int, Request, bool]] = []
    now = 0
    while history or scheduled or simulation.scheduler.waiting or simulation.scheduler.running:
        while history and not history[0].after:
            wave, *history = history
            first, *_ = [
                simulation.submit(wave.prompt, wave.new, wave.cached) for _ in range(wave.count)
            ]
            if wave.paused:
                scheduled.append((now + wave.paused, first, True))
                scheduled.append((now + 2 * wave.paused, first, False))
        if history:
            history = [replace(history[0], after=history[0].after - 1), *history[1:]]
        for when, request, pauses in scheduled:
            if when == now:
                (simulation.pause if pauses else simulation.scheduler.resume)(request)
        scheduled = [each for each in scheduled if each[0] > now]
        simulation.step()
        now += 1
        assert now < 5000, "requests never end"
    assert all(each.finish_reason == "length" for each in simulation.requests)
