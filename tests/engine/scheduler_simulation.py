"""Simulation of a scheduler: its steps run on blocks that are only counted, and are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roseinfer import EngineConfig, SamplingParams
from roseinfer.engine.request import FinishReason, Request
from roseinfer.engine.scheduler import Scheduler
from roseinfer.kv.sequence import CachedSequence

if TYPE_CHECKING:
    from roseinfer.engine.scheduler import Step


@dataclass
class Blocks:
    """Accounting of blocks that store nothing.

    Cached blocks of a prompt are free until the prompt begins. A cached prefix that ends within a
    block is copied when its sequence appends to it.
    """

    capacity: int
    size: int
    num_used: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Cached tokens of a prompt, by the request's id."""
    num_clears: int = 0
    num_lookups: int = 0

    @property
    def available(self) -> int:
        return self.capacity - self.num_used

    def count_needed_blocks(self, session: CachedSequence, count: int) -> int:
        more = -(-(session.num_stored + count) // self.size) - len(session.block_lists[0])
        return more + (
            session.num_stored % self.size > 0 and session.num_stored >= session.token_capacity
        )

    def reuse_prefix(self, request: Request) -> None:
        session = request.sequence
        assert session.num_stored == 0, "a running request was admitted again"
        self.num_lookups += 1
        num_cached = min(self.cached.get(request.id, 0), len(session.token_ids) - 1)
        request.num_cached_tokens = session.num_stored = session.token_capacity = num_cached
        self._hold(session)

    def release_blocks(self, request: Request) -> None:
        session = request.sequence
        session.num_stored = session.token_capacity = 0
        self._hold(session)

    def clear_prefix_cache(self) -> None:
        self.cached.clear()
        self.num_clears += 1

    def store(self, session: CachedSequence, count: int) -> None:
        session.num_stored += count
        self._hold(session)
        session.token_capacity = len(session.block_lists[0]) * self.size

    def _hold(self, session: CachedSequence) -> None:
        count = -(-session.num_stored // self.size)
        self.num_used += count - len(session.block_lists[0])
        session.block_lists = [[0] * count]


class SchedulerSimulation:
    """A scheduler whose steps are run and checked."""

    def __init__(self, *, blocks: int = 1000, size: int = 4, **config: Any) -> None:
        self.config = EngineConfig(block_size=size, **config)
        self.block_allocator = Blocks(blocks, size)
        block_allocator: Any = self.block_allocator
        self.scheduler = Scheduler(self.config, block_allocator)
        self.requests: list[Request] = []
        self.admission_order: list[int] = []
        """Ids in the order in which they first ran."""
        self.paused = False
        """True once any request was paused."""

    def submit(self, prompt: int, new: int = 1, cached: int = 0) -> Request:
        request = Request(
            id=len(self.requests),
            params=SamplingParams(),
            seed=0,
            prompt_length=prompt,
            max_generated_tokens=new,
            sequence=CachedSequence([[]], [0] * prompt),
            text=None,
        )
        self.requests.append(request)
        if cached:
            self.block_allocator.cached[request.id] = cached
        self.scheduler.add(request)
        return request

    def end(self, request: Request, reason: FinishReason) -> None:
        if request.finish_reason is None:
            self.scheduler.remove(request)
            request.finish_reason = reason

    def pause(self, request: Request) -> None:
        if request.finish_reason is None:
            self.paused = True
            self.scheduler.pause(request)

    def step(self) -> Step:
        scheduler = self.scheduler
        before = [each for each in scheduler.running.values() if each not in scheduler._leaving]
        preempted_before = [request.times_preempted for request in before]
        step = scheduler.next_step()
        preempted = [
            request
            for request, count in zip(before, preempted_before, strict=True)
            if request.times_preempted > count
        ]
        self._check_limits(step)
        self._check_preempted(
            preempted, [request for request in before if request not in preempted]
        )
        self._run(step)
        for request in scheduler.running.values():
            if request.id not in self.admission_order:
                self.admission_order.append(request.id)
        for request in list(scheduler.running.values()):
            if request.num_generated == request.max_generated_tokens:
                self.end(request, FinishReason.LENGTH)
        self._check_accounts()
        return step

    def run(self, max_steps: int = 5000) -> list[Step]:
        steps = []
        while self.scheduler.waiting or self.scheduler.running:
            steps.append(self.step())
            assert len(steps) < max_steps, "requests never end"
        return steps

    # --------------------------------------------------------------- invariants of a step

    def _check_limits(self, step: Step) -> None:
        config, running = self.config, self.scheduler.running
        in_chunks = [request for request, _ in step.chunks]
        scheduled = [*step.decoding, *in_chunks]
        assert len(running) <= config.max_batch_size
        assert len(step.chunks) <= config.prefill_max_batch_size
        assert len({request.id for request in scheduled}) == len(scheduled), "duplicate request"
        assert all(running[request.id] is request for request in scheduled)
        assert step.max_blocks_needed <= self.block_allocator.available
        for request in running.values():
            if request.num_unstored == 1 and request not in in_chunks:
                assert request in step.decoding, "a running request is not scheduled"
        assert all(request.num_unstored == 1 for request in step.decoding)
        assert all(1 <= count <= request.num_unstored for request, count in step.chunks)
        total = sum(count for _, count in step.chunks)
        if config.chunked_prefill:
            assert total <= config.max_prompt_tokens
        else:
            assert all(count == request.num_unstored for request, count in step.chunks)
            assert total <= config.max_prompt_tokens or len(step.chunks) == 1
        self._check_turns(in_chunks)

    def _check_turns(self, in_chunks: list[Request]) -> None:
        """A prompt in progress gets no tokens only if the prompts after it get none either."""
        begun = [each for each in self.scheduler.running.values() if each.num_unstored > 1]
        served = [request in in_chunks for request in begun]
        assert served == sorted(served, reverse=True), "a prompt in progress was overtaken"

    @staticmethod
    def _check_preempted(preempted: list[Request], remaining: list[Request]) -> None:
        for request in preempted:
            assert all(other.id < request.id for other in remaining), (
                "preempted request is not the newest"
            )

    def _run(self, step: Step) -> None:
        work = [(request, 1) for request in step.decoding] + step.chunks
        needs = [
            self.block_allocator.count_needed_blocks(request.sequence, count)
            for request, count in work
        ]
        assert sum(needs) <= step.max_blocks_needed, "the step needs more blocks than it counted"
        for request, count in work:
            self.block_allocator.store(request.sequence, count)
            if not request.num_unstored:
                request.sequence.token_ids.append(0)

    def _check_accounts(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        alive = {request.id for request in self.requests if request.finish_reason is None}
        ids = [*running, *(request.id for request in waiting)]
        paused = {*self.scheduler.paused} - {*running}
        assert sorted([*ids, *paused]) == sorted(alive), "a request is lost or listed twice"
        expected_used = sum(len(request.sequence.block_lists[0]) for request in running.values())
        assert self.block_allocator.num_used == expected_used
        assert all(request.sequence.block_lists == [[]] for request in waiting)
        if self.config.prefill_admission_policy == "fifo":
            queued = [request.id for request in waiting] if self.paused else ids
            assert queued == sorted(queued), "requests are not in order of arrival"
