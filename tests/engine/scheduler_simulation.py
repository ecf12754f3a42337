"""A scheduler alone: its steps are carried out on blocks that are only counted, and checked."""

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
    """This supply of blocks keeps accounts and stores nothing.

    What is known of a prompt lies in blocks that nobody uses until the prompt begins. A known
    part that ends within a block is copied when it is written behind.
    """

    capacity: int
    size: int
    taken: int = 0
    known: dict[int, int] = field(default_factory=dict)
    """Tokens of a request's prompt, by its id."""
    drops: int = 0
    starts: int = 0

    @property
    def available(self) -> int:
        return self.capacity - self.taken

    def count_needed_blocks(self, session: CachedSequence, count: int) -> int:
        more = -(-(session.num_stored + count) // self.size) - len(session.block_lists[0])
        return more + (
            session.num_stored % self.size > 0 and session.num_stored >= session.token_capacity
        )

    def reuse_prefix(self, request: Request) -> None:
        session = request.sequence
        assert session.num_stored == 0, "a request that has begun begins again"
        self.starts += 1
        found = min(self.known.get(request.id, 0), len(session.token_ids) - 1)
        request.num_cached_tokens = session.num_stored = session.token_capacity = found
        self._hold(session)

    def release_blocks(self, request: Request) -> None:
        session = request.sequence
        session.num_stored = session.token_capacity = 0
        self._hold(session)

    def clear_prefix_cache(self) -> None:
        self.known.clear()
        self.drops += 1

    def store(self, session: CachedSequence, count: int) -> None:
        session.num_stored += count
        self._hold(session)
        session.token_capacity = len(session.block_lists[0]) * self.size

    def _hold(self, session: CachedSequence) -> None:
        count = -(-session.num_stored // self.size)
        self.taken += count - len(session.block_lists[0])
        session.block_lists = [[0] * count]


class World:
    """Steps of a scheduler are carried out here, and each is checked against what a step may be."""

    def __init__(self, *, blocks: int = 1000, size: int = 4, **config: Any) -> None:
        self.config = EngineConfig(block_size=size, **config)
        self.block_allocator = Blocks(blocks, size)
        block_allocator: Any = self.block_allocator
        self.scheduler = Scheduler(self.config, block_allocator)
        self.requests: list[Request] = []
        self.admitted_part: list[int] = []
        """Ids in the order in which they first ran."""
        self.paused = False
        """True if any request ever was."""

    def submit(self, prompt: int, new: int = 1, known: int = 0) -> Request:
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
        if known:
            self.block_allocator.known[request.id] = known
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
        gone = [
            request
            for request, count in zip(before, preempted_before, strict=True)
            if request.times_preempted > count
        ]
        self._check_limits(step)
        self._check_preempted(gone, [request for request in before if request not in gone])
        self._carry_out(step)
        for request in scheduler.running.values():
            if request.id not in self.admitted_part:
                self.admitted_part.append(request.id)
        for request in list(scheduler.running.values()):
            if request.num_generated == request.max_generated_tokens:
                self.end(request, FinishReason.LENGTH)
        self._check_accounts()
        return step

    def run(self, most: int = 5000) -> list[Step]:
        steps = []
        while self.scheduler.waiting or self.scheduler.running:
            steps.append(self.step())
            assert len(steps) < most, "requests that never end"
        return steps

    # ------------------------------------------------------------------ what a step may be

    def _check_limits(self, step: Step) -> None:
        config, running = self.config, self.scheduler.running
        in_chunks = [request for request, _ in step.chunks]
        taking_part = [*step.decoding, *in_chunks]
        assert len(running) <= config.max_batch_size
        assert len(step.chunks) <= config.prefill_max_batch_size
        assert len({request.id for request in taking_part}) == len(taking_part), "twice"
        assert all(running[request.id] is request for request in taking_part)
        assert step.max_blocks_needed <= self.block_allocator.available
        for request in running.values():
            if request.num_unstored == 1 and request not in in_chunks:
                assert request in step.decoding, "a running request stalls"
        assert all(request.num_unstored == 1 for request in step.decoding)
        assert all(1 <= count <= request.num_unstored for request, count in step.chunks)
        total = sum(count for _, count in step.chunks)
        if config.chunked_prefill:
            assert total <= config.prefill_max_tokens
        else:
            assert all(count == request.num_unstored for request, count in step.chunks)
            assert total <= config.prefill_max_tokens or len(step.chunks) == 1
        self._check_turns(in_chunks)

    def _check_turns(self, in_chunks: list[Request]) -> None:
        """A prompt that gets nothing is behind none that gets something."""
        begun = [each for each in self.scheduler.running.values() if each.num_unstored > 1]
        served = [request in in_chunks for request in begun]
        assert served == sorted(served, reverse=True), "overtaken half way"

    @staticmethod
    def _check_preempted(gone: list[Request], stayed: list[Request]) -> None:
        for request in gone:
            assert all(other.id < request.id for other in stayed), "not the newest"

    def _carry_out(self, step: Step) -> None:
        work = [(request, 1) for request in step.decoding] + step.chunks
        needs = [
            self.block_allocator.count_needed_blocks(request.sequence, count)
            for request, count in work
        ]
        assert sum(needs) <= step.max_blocks_needed, "more blocks than were said to be needed"
        for request, count in work:
            self.block_allocator.store(request.sequence, count)
            if not request.num_unstored:
                request.sequence.token_ids.append(0)

    def _check_accounts(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        alive = {request.id for request in self.requests if request.finish_reason is None}
        ids = [*running, *(request.id for request in waiting)]
        paused = {*self.scheduler.paused} - {*running}
        assert sorted([*ids, *paused]) == sorted(alive), "lost, or twice"
        held = sum(len(request.sequence.block_lists[0]) for request in running.values())
        assert self.block_allocator.taken == held
        assert all(request.sequence.block_lists == [[]] for request in waiting)
        if self.config.prefill_admission_policy == "fifo":
            queued = [request.id for request in waiting] if self.paused else ids
            assert queued == sorted(queued), "not in the order they came"
