"""Which requests do how much in the next step. No tensor is touched here.

Every running request that has only its newest token to store takes part in each step. What
is left of a step's limits goes to prompts (``admission``). When blocks run out, prefixes
that nobody uses go first; then the newest running request gives up its blocks and waits, to
be computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from roseinfer.engine.admission import PromptShare
from roseinfer.errors import OutOfBlocks

if TYPE_CHECKING:
    from roseinfer.config import EngineConfig
    from roseinfer.engine.request import Request
    from roseinfer.engine.sequences import InferenceSession


class Supply(Protocol):
    """The blocks there are, as the scheduler sees them."""

    @property
    def available(self) -> int:
        """Blocks that are free or could be freed at once."""

    def needed(self, session: InferenceSession, count: int) -> int:
        """Most blocks that storing so many tokens more can take."""

    def start(self, request: Request) -> None:
        """Let a request that has nothing stored begin with what is known of its prompt."""

    def give_back(self, request: Request) -> None:
        """Take back all that a request holds."""

    def drop_prefixes(self) -> None:
        """Keep no block but for the requests that hold it."""


@dataclass(slots=True)
class Step:
    """What the next forward pass is made of."""

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

    def __init__(self, config: EngineConfig, supply: Supply) -> None:
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
        """What to do now; nothing only where there are no requests, or where it depends on
        tokens in flight: who ends with them, and who must make room for others."""
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
        """The requests that have one token to store, once there are blocks for all.

        None where somebody must make room and tokens in flight may end others: until they have
        landed, nobody is let in to take what there is.
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
        """Of a request that was let in and does not even fit alone: a fault of ours."""
        request = next(iter(self.running.values()), None) or self.waiting[0]
        return OutOfBlocks(
            needed=self._supply.needed(request.session, request.pending),
            free=self._supply.available,
            where=f"the cache, with request {request.id} alone,",
        )
