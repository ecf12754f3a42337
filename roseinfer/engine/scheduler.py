"""The scheduler: decides which requests compute how many tokens in the next step.

It touches no tensor. Every running request that has only its newest token to store is part of each
step. The rest of a step's limits goes to prompts (``PrefillBudget``). When blocks run out, cached
prefixes without holders are evicted; then the newest running request is preempted and waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from roseinfer.errors import OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from roseinfer.config import EngineConfig
    from roseinfer.engine.request import Request, RequestBlockAllocator


_MIN_LOOKAHEAD = 64
"""Number of waiting requests that the scheduler considers, unless a step may begin more. A longer
queue costs nothing."""
_MAX_SKIPS = 8
"""Number of times that a waiting request may be skipped. After that it is admitted as soon as it
fits, with a part of its prompt if need be, and no later request is admitted before it."""


@dataclass(slots=True)
class Step:
    """The work of the next forward pass."""

    decoding: list[Request] = field(default_factory=list)
    """Requests that store their newest token, and their drafts."""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that store tokens of their prompts, each with the number of tokens."""
    max_blocks_needed: int = 0
    """Most blocks that the step can take."""
    num_spare_blocks: int = 0
    """Further available blocks, without those reserved for prompts that have begun."""
    num_out_of_order: int = 0
    """Number of times that a request was skipped for a later one."""

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class Scheduler:
    """The queue of waiting requests, and the sets of running and paused ones."""

    def __init__(self, config: EngineConfig, block_allocator: RequestBlockAllocator) -> None:
        self._config = config
        self._block_allocator = block_allocator
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        """Paused requests, which get no token until they are resumed. They hold no blocks, except
        those that are still running because they have tokens in flight."""
        self.num_preemptions = 0
        """Number of preemptions, for other requests or after a failed step."""
        self._leaving: list[Request] = []
        """Requests paused while running, to be preempted once they have no tokens in flight."""

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_full_lookahead(self) -> bool:
        """True if further waiting requests would not change the next step."""
        config = self._config
        in_order = config.prefill_admission_policy == "fifo"
        max_waiting = config.prefill_max_batch_size if in_order else queue_lookahead(config)
        if len(self.waiting) >= max_waiting:
            return True
        if (
            not in_order
            or sum(each.num_unstored for each in self.waiting) < config.max_prompt_tokens
        ):
            return False
        new = (
            each.num_unstored
            for each in self.waiting
            if not self._block_allocator.may_hit_prefix(each)
        )
        return sum(new) >= config.max_prompt_tokens

    def remove(self, request: Request) -> None:
        paused = self.paused.pop(request.id, None)
        if request in self._leaving:
            self._leaving.remove(request)
        if request.id in self.running:
            self._block_allocator.release_blocks(request)
            del self.running[request.id]
        elif paused is None:
            self.waiting.remove(request)

    def pause(self, request: Request) -> None:
        """Pause a request: no more tokens until it is resumed."""
        if request.id in self.paused:
            return
        self.paused[request.id] = request
        if request.id not in self.running:
            self.waiting.remove(request)
        elif request not in self._leaving:
            self._leaving.append(request)

    def resume(self, request: Request) -> None:
        """Resume a request, if it is paused: put it back into the queue, in order of arrival."""
        if self.paused.pop(request.id, None) and request.id not in self.running:
            self._requeue(request)

    @property
    def _in_flight(self) -> bool:
        return any(request.num_in_flight for request in self.running.values())

    def next_step(self) -> Step:
        """Return the next step.

        The step is empty if there are no requests, or if tokens in flight must be read back first:
        they may end a request, and if they do not, a request must be preempted.
        """
        self._preempt_paused()
        if not (self.running or self.waiting):
            return Step()
        cache_cleared = False
        for _ in range(len(self.running) + 2):
            step = self._schedule_decodes()
            if step is None:
                return Step()
            if self.waiting or len(step.decoding) < len(self.running):
                PrefillBudget(self._config, self._block_allocator, step).schedule_prompts(
                    self.running, self.waiting
                )
            if step or self._in_flight:
                return step
            # No request can proceed: each of several has too few blocks for its prompt, or the
            # only one shares a block with the prefix cache and would have to copy it.
            if len(self.running) > 1:
                self._preempt_newest()
            elif not cache_cleared:
                self._block_allocator.clear_prefix_cache()
                if self.waiting:
                    self.waiting[0].min_available_blocks = 0  # it included a copy-on-write block
                cache_cleared = True
        # A submitted request that does not fit even alone is a bug of the engine.
        request = next(iter(self.running.values()), None) or self.waiting[0]
        raise OutOfBlocks(
            needed=self._block_allocator.count_needed_blocks(
                request.sequence, request.num_unstored
            ),
            free=self._block_allocator.available,
            owner=f"the cache, with request {request.id} alone,",
        )

    def _schedule_decodes(self) -> Step | None:
        """Return a step of all requests that have one token to store, preempting some if necessary.

        This returns None if it would have to preempt while tokens are in flight, since these may
        end a request: nothing is preempted or admitted until they are read back.
        """
        while True:
            decoding = []
            blocks = 0
            for request in self.running.values():
                if request.may_decode:
                    sequence = request.sequence
                    decoding.append(request)
                    if sequence.num_stored >= sequence.token_capacity:
                        blocks += self._block_allocator.count_needed_blocks(sequence, 1)
            available = self._block_allocator.available
            if blocks <= available:
                return Step(decoding, max_blocks_needed=blocks, num_spare_blocks=available - blocks)
            if self._in_flight:
                return None
            if len(self.running) == 1:
                return Step()
            self._preempt_newest()

    def preempt_all(self) -> None:
        """Preempt all running requests."""
        while self.running:
            self._preempt_newest()

    def _preempt_newest(self) -> None:
        self.num_preemptions += 1
        self._preempt(self.running.pop(max(self.running)))

    def _preempt_paused(self) -> None:
        for request in [each for each in self._leaving if not each.num_in_flight]:
            self._leaving.remove(request)
            if self.running.pop(request.id, None):  # None: it was preempted meanwhile
                self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Release all blocks of a running request. The prefix cache may keep them."""
        self._block_allocator.release_blocks(request)
        request.times_preempted += 1
        if request.id not in self.paused:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Put a request back into the queue, before all that arrived after it."""
        later = (at for at, other in enumerate(self.waiting) if other.id > request.id)
        self.waiting.insert(next(later, len(self.waiting)), request)


def queue_lookahead(config: EngineConfig) -> int:
    """Return the number of waiting requests that a step may choose among."""
    return max(_MIN_LOOKAHEAD, config.prefill_max_batch_size)


class PrefillBudget:
    """The part of a step for prompts: first those that have begun, then new ones."""

    def __init__(
        self, config: EngineConfig, block_allocator: RequestBlockAllocator, step: Step
    ) -> None:
        self.config = config
        self.block_allocator = block_allocator
        self.step = step
        self.token_budget = config.max_prompt_tokens
        self.prompt_budget = config.prefill_max_batch_size
        self.block_budget = block_allocator.available - step.max_blocks_needed
        """Unreserved blocks. All blocks of a prompt are reserved when it is admitted, so that
        prompts do not run each other out of blocks half way."""

    def schedule_prompts(
        self, running: MutableMapping[int, Request], waiting: deque[Request]
    ) -> None:
        for request in running.values():
            pending = request.num_unstored
            if pending > 1:
                reserved = self.block_allocator.count_needed_blocks(request.sequence, pending)
                self._add_chunk(request, pending, self.block_budget)
                self.block_budget -= reserved
        first_come = self.config.prefill_admission_policy == "fifo"
        skipped: list[Request] = []
        max_passed_over = 0
        """Largest ``times_skipped`` among the skipped requests."""
        for request in list(islice(waiting, queue_lookahead(self.config))):
            if min(self.token_budget, self.prompt_budget, self.block_budget) < 1 or (
                skipped and first_come
            ):
                break
            if len(running) >= self.config.max_batch_size:
                break
            if max_passed_over >= _MAX_SKIPS:
                break
            if self._admit(request, must_fit=not first_come and request.times_skipped < _MAX_SKIPS):
                waiting.remove(request)
                running[request.id] = request
                self.step.num_out_of_order += len(skipped)
                for other in skipped:
                    other.times_skipped += 1
                    max_passed_over = max(max_passed_over, other.times_skipped)
            else:
                skipped.append(request)
                max_passed_over = max(max_passed_over, request.times_skipped)
        self.step.num_spare_blocks = self.block_budget

    def _admit(self, request: Request, *, must_fit: bool) -> bool:
        """Begin a prompt if the cache has enough blocks for all of it.

        With ``must_fit`` it must also fit into this step, unless the step has no other prompt yet.
        """
        if request.min_available_blocks > self.block_budget:
            return False
        before = self.block_allocator.available
        self.block_allocator.reuse_prefix(request)
        num_held = before - self.block_allocator.available
        pending = request.num_unstored
        needed = self.block_allocator.count_needed_blocks(request.sequence, pending)
        has_room = num_held + needed <= self.block_budget and self._chunk_size(pending) > 0
        too_long = must_fit and pending > self.token_budget and not self._has_no_prompt
        if not has_room:
            request.min_available_blocks = num_held + needed
        elif too_long:
            request.times_skipped += 1
        if not has_room or too_long:
            self.block_allocator.release_blocks(request)
            return False
        self._add_chunk(request, pending, self.block_budget - num_held)
        self.block_budget -= num_held + needed
        return True

    def _add_chunk(self, request: Request, pending: int, blocks: int) -> None:
        """Add as much of a prompt to the step as the limits allow."""
        count = self._chunk_size(pending)
        needed = self.block_allocator.count_needed_blocks(request.sequence, count)
        if not count or needed > blocks:
            return
        self.step.chunks.append((request, count))
        self.step.max_blocks_needed += needed
        self.token_budget -= count
        self.prompt_budget -= 1

    def _chunk_size(self, pending: int) -> int:
        """Return how many tokens of a prompt this step may store."""
        if self.prompt_budget < 1 or self.token_budget < 1:
            return 0
        if self.config.chunked_prefill:
            return min(pending, self.token_budget)
        return pending if self._has_no_prompt or pending <= self.token_budget else 0

    @property
    def _has_no_prompt(self) -> bool:
        """True if the step has no prompt yet."""
        return not self.step.chunks
