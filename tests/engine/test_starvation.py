"""Nobody is kept waiting: who is admitted when, on a full cache and with long prompts.

Before each step is carried out, every request that was left waiting is looked at: could it have
begun, given what those in front of it took, and unless one of these may be passed over no more?
What is counted here shares no code with the scheduler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.scheduler_simulation import World

if TYPE_CHECKING:
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step

PATIENCE = 8
"""Steps of which each had room for a request, and in which it waited all the same."""


class WatchedWorld(World):
    """Counts how long requests wait that could begin."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.could: Counter[int] = Counter()
        """Steps that had room for each and in which it waited."""
        self.waited: Counter[int] = Counter()
        """Those of them in which nobody in front of it had lost patience."""
        self.overtaken: Counter[int] = Counter()
        """How many later requests were admitted before each that waited."""

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
                assert at or not self._could_begin(request, later, step), "it waits for nothing"
                continue
            in_front = list(self.scheduler.waiting)[:at]
            could = self._could_begin(request, later, step)
            self.could[request.id] += could
            self.waited[request.id] += could and all(e.times_skipped < PATIENCE for e in in_front)
            overtaken = self.overtaken[request.id]
            assert self.waited[request.id] <= PATIENCE, f"{request.id} could begin long ago"
            assert overtaken <= PATIENCE, f"{request.id} is passed over"
            assert request.times_skipped <= self.could[request.id] + overtaken, "too impatient"

    def _could_begin(self, request: Request, later: list[Request], step: Step) -> bool:
        """True if there was room for it when its turn came: before those behind it had theirs."""
        config, size = self.config, self.block_allocator.size
        in_front = [(each, count) for each, count in step.chunks if each not in later]
        tokens = config.prefill_max_tokens - sum(count for _, count in in_front)
        length = len(request.sequence.token_ids)
        if not config.chunked_prefill and in_front and length > tokens:
            return False
        places = config.max_batch_size - len(self.scheduler.running) + len(later)
        if min(tokens, places, config.prefill_max_batch_size - len(in_front)) < 1:
            return False
        running = [each for each in self.scheduler.running.values() if each not in later]
        blocks = self.block_allocator.available + sum(
            len(each.sequence.block_lists[0]) for each in later
        )
        blocks -= sum(
            self.block_allocator.count_needed_blocks(each.sequence, each.num_unstored)
            for each in running
        )
        known = min(self.block_allocator.known.get(request.id, 0), length - 1)
        return -(-length // size) + (known % size > 0) <= blocks


@dataclass(frozen=True)
class Wave:
    """Requests alike that come together."""

    after: int
    """Steps since the ones before."""
    count: int
    prompt: int
    new: int
    known: int
    paused: int = 0
    """Steps after which the first of them is paused for as many, if it still runs; 0 for never."""


waves = st.lists(
    st.builds(
        Wave,
        after=st.sampled_from([0, 1, 1, 2, 4]),
        count=st.sampled_from([1, 1, 2, 4]),
        prompt=st.sampled_from([1, 2, 5, 12, 30, 60]),
        new=st.sampled_from([1, 2, 5, 12]),
        known=st.sampled_from([0, 0, 3, 8]),
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
HELD_BY_PACKING = [Wave(0, 1, 60, 1, 0), *[Wave(1, 1, 12, 1, 0), Wave(0, 1, 30, 1, 0)] * 12]


@pytest.mark.parametrize("policy", ["fifo", "pack"])
@settings(max_examples=80, deadline=None, database=None)
@given(waves, limits, st.sampled_from([0, 0, 4, 40]))
@example(HELD_BY_PACKING, {"prefill_max_tokens": 16, "size": 4}, 40)
def test_nobody_is_kept_waiting(
    policy: str, history: list[Wave], limits: dict[str, Any], spare: int
) -> None:
    """The cache has room for the largest request, or for some more tokens."""
    largest = max(each.prompt + each.new for each in history) + spare
    blocks = -(-largest // limits["size"])
    world = WatchedWorld(blocks=blocks, prefill_admission_policy=policy, **limits)
    due: list[tuple[int, Request, bool]] = []
    now = 0
    while history or due or world.scheduler.waiting or world.scheduler.running:
        while history and not history[0].after:
            wave, *history = history
            first, *_ = [world.submit(wave.prompt, wave.new, wave.known) for _ in range(wave.count)]
            if wave.paused:
                due.append((now + wave.paused, first, True))
                due.append((now + 2 * wave.paused, first, False))
        if history:
            history = [replace(history[0], after=history[0].after - 1), *history[1:]]
        for when, request, pauses in due:
            if when == now:
                (world.pause if pauses else world.scheduler.resume)(request)
        due = [each for each in due if each[0] > now]
        world.step()
        now += 1
        assert now < 5000, "requests that never end"
    assert all(each.finish_reason == "length" for each in world.requests)
