"""The scheduler decides which requests do how much in the next step. It touches no tensor.

Every running request that has only its newest token to store takes part in each step. What
is left of a step's limits goes to prompts (``PromptShare``). When blocks run out, prefixes
that nobody uses go first; then the newest running request gives up its blocks and waits, to
be computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from roseinfer.errors import OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from roseinfer.config import EngineConfig
    from roseinfer.engine.request import BlockSupply, Request


_WINDOW = 64
"""Waiting requests to choose among, so that a long queue costs nothing; more only where more
prompts may be begun in a step."""
_PATIENCE = 8
"""Later requests that may be admitted before one that waits."""


@dataclass(slots=True)
class Step:
    """The work of the next forward pass."""

    decoding: list[Request] = field(default_factory=list)
    """Requests that store their newest token."""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that store so many tokens of their prompt."""
    blocks: int = 0
    """Most blocks that the step takes."""
    spare: int = 0
    """Blocks that neither the step takes nor was promised to a prompt that has begun."""
    overtaken: int = 0
    """Requests that were passed over for a later one."""

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class Scheduler:
    """The requests that wait and those that run."""

    def __init__(self, config: EngineConfig, supply: BlockSupply) -> None:
        self._config = config
        self._supply = supply
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and take back what it holds."""
        if request.id in self.running:
            self._supply.give_back(request)
            del self.running[request.id]
        else:
            self.waiting.remove(request)

    @property
    def in_flight(self) -> bool:
        """Some request has tokens that were not read yet."""
        return any(request.in_flight for request in self.running.values())

    def next_step(self) -> Step:
        """Decide what to do now.

        The step is empty when there are no requests, or when tokens in flight decide: they may
        end a request, and otherwise one must make room for the others.
        """
        if not (self.running or self.waiting):
            return Step()
        dropped = False
        for _ in range(len(self.running) + 2):
            step = self._decoding()
            if step is None:
                return Step()
            if self.waiting or len(step.decoding) < len(self.running):
                PromptShare.of(self._config, self._supply, step).fill(self.running, self.waiting)
            if step or self.in_flight:
                return step
            # Nobody can go on: each of several has too little for its prompt, or the last
            # one shares a block with the prefix cache and would have to copy it.
            if len(self.running) > 1:
                self._preempt_newest()
            elif not dropped:
                self._supply.drop_prefixes()
                if self.waiting:
                    self.waiting[0].waits_for = 0  # it was counted with a prefix to copy
                dropped = True
        raise self._stuck()

    def _decoding(self) -> Step | None:
        """A step for the requests that have one token to store, with blocks for all of them.

        None when some request must make room, and tokens in flight may end one: nothing is
        preempted or admitted until they have landed.
        """
        while True:
            decoding = []
            blocks = 0
            for request in self.running.values():
                if request.may_decode:
                    session = request.session
                    decoding.append(request)
                    if session.stored >= session.room:
                        blocks += 1
            available = self._supply.available
            if blocks <= available:
                return Step(decoding, blocks=blocks, spare=available - blocks)
            if self.in_flight:
                return None
            if len(self.running) == 1:
                return Step()
            self._preempt_newest()

    def start_over(self) -> None:
        """Have all that runs computed again, as if its blocks had been needed."""
        for request in sorted(self.running.values(), key=lambda each: each.id, reverse=True):
            self._preempt(request)

    def _preempt_newest(self) -> None:
        self._preempt(self.running[max(self.running)])

    def _preempt(self, request: Request) -> None:
        del self.running[request.id]
        self._supply.give_back(request)
        request.preempted += 1
        self.waiting.appendleft(request)

    def _stuck(self) -> OutOfBlocks:
        """The error for an admitted request that does not even fit alone: a fault of ours."""
        request = next(iter(self.running.values()), None) or self.waiting[0]
        return OutOfBlocks(
            needed=self._supply.needed(request.session, request.pending),
            free=self._supply.available,
            where=f"the cache, with request {request.id} alone,",
        )


@dataclass(slots=True)
class PromptShare:
    """What one step does for prompts: it goes on with those begun, then begins new ones."""

    config: EngineConfig
    supply: BlockSupply
    step: Step
    tokens: int
    prompts: int
    blocks: int
    """Blocks that are promised to nobody. A prompt is promised all that it will take when it is
    admitted, so that prompts do not run each other out of blocks half way."""

    @classmethod
    def of(cls, config: EngineConfig, supply: BlockSupply, step: Step) -> PromptShare:
        return cls(
            config,
            supply,
            step,
            config.prefill_max_tokens,
            config.prefill_max_batch_size,
            supply.available - step.blocks,
        )

    def fill(self, running: MutableMapping[int, Request], waiting: deque[Request]) -> None:
        self._go_on(running)
        first_come = self.config.prefill_admission_policy == "fifo"
        skipped: list[Request] = []
        for request in list(islice(waiting, max(_WINDOW, self.config.prefill_max_batch_size))):
            if not self._may_admit(running) or (skipped and first_come):
                break
            if skipped and skipped[0].passed_over >= _PATIENCE:
                break
            if self._admit(request, whole=not first_come):
                waiting.remove(request)
                running[request.id] = request
                self.step.overtaken += len(skipped)
                for other in skipped:
                    other.passed_over += 1
            else:
                skipped.append(request)
        self.step.spare = self.blocks

    def _go_on(self, running: Mapping[int, Request]) -> None:
        for request in running.values():
            pending = request.pending
            if pending > 1:
                promised = self.supply.needed(request.session, pending)
                self._store(request, pending, self.blocks)
                self.blocks -= promised

    def _may_admit(self, running: Mapping[int, Request]) -> bool:
        return (
            self.tokens > 0
            and self.prompts > 0
            and self.blocks > 0
            and len(running) < self.config.max_batch_size
        )

    def _admit(self, request: Request, *, whole: bool) -> bool:
        """Begin a prompt if all of it has room; with ``whole``, in this step if possible."""
        if request.waits_for > self.blocks:
            return False
        untouched = self.tokens == self.config.prefill_max_tokens
        if whole and request.pending > self.tokens and not untouched:
            return False
        before = self.supply.available
        self.supply.start(request)
        held = before - self.supply.available
        needed = self.supply.needed(request.session, request.pending)
        if held + needed > self.blocks or not self._count(request.pending):
            request.waits_for = held + needed
            self.supply.give_back(request)
            return False
        self._store(request, request.pending, self.blocks - held)
        self.blocks -= held + needed
        return True

    def _store(self, request: Request, pending: int, blocks: int) -> None:
        """Put as much of a prompt into the step as the limits allow."""
        count = self._count(pending)
        needed = self.supply.needed(request.session, count)
        if not count or needed > blocks:
            return
        self.step.chunks.append((request, count))
        self.step.blocks += needed
        self.tokens -= count
        self.prompts -= 1

    def _count(self, pending: int) -> int:
        """Count the tokens of a prompt that this step may store."""
        if self.prompts < 1 or self.tokens < 1:
            return 0
        if self.config.chunked_prefill:
            return min(pending, self.tokens)
        untouched = self.tokens == self.config.prefill_max_tokens
        return pending if untouched or pending <= self.tokens else 0
