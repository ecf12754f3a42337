"""The scheduler decides which requests do how much in the next step. It touches no tensor.

Every running request that has only its newest token to store takes part in each step. What is
left of a step's limits goes to prompts (``PromptShare``). When blocks run out, cached prefixes
that nobody uses are evicted; then the newest running request is preempted and waits.
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
    from roseinfer.engine.request import BlockSupply, Request


_WINDOW = 64
"""The scheduler looks at so many waiting requests, or at as many as a step may begin if these
are more. A longer queue costs nothing."""
_PATIENCE = 8
"""So often a request that waits may be passed over. Then it is begun as soon as there is room for
it, in part if need be, and nobody behind it is admitted before."""


@dataclass(slots=True)
class Step:
    """The work of the next forward pass."""

    decoding: list[Request] = field(default_factory=list)
    """Requests that store their newest token."""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that store tokens of their prompts, each with the number of tokens."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By the ids of decoding requests, tokens to store behind their newest, which may be wrong."""
    blocks: int = 0
    """The most blocks that the step can take."""
    spare: int = 0
    """Available blocks besides, less those promised to prompts that have begun."""
    overtaken: int = 0
    """How often a request was passed over for a later one."""

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class Scheduler:
    """Holds the requests that wait and those that run."""

    def __init__(self, config: EngineConfig, supply: BlockSupply) -> None:
        self._config = config
        self._supply = supply
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.paused: dict[int, Request] = {}
        """Requests that get no token until they are resumed. They hold nothing, and so they are in
        nobody's way, but for those among the running ones that still have tokens in flight."""
        self.num_preemptions = 0
        """How often blocks were taken from a request that ran, for others or to start over."""
        self._leaving: list[Request] = []
        """Requests that were paused while they ran, and are set aside when none is in flight."""

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def is_fed(self) -> bool:
        """Tell if the next step would be the same with more requests behind those that wait."""
        config = self._config
        in_order = config.prefill_admission_policy == "fifo"
        most = config.prefill_max_batch_size if in_order else looked_at(config)
        if len(self.waiting) >= most:
            return True
        if not in_order or sum(each.pending for each in self.waiting) < config.prefill_max_tokens:
            return False
        new = (each.pending for each in self.waiting if not self._supply.may_find(each))
        return sum(new) >= config.prefill_max_tokens

    def remove(self, request: Request) -> None:
        paused = self.paused.pop(request.id, None)
        if request in self._leaving:
            self._leaving.remove(request)
        if request.id in self.running:
            self._supply.give_back(request)
            del self.running[request.id]
        elif paused is None:
            self.waiting.remove(request)

    def pause(self, request: Request) -> None:
        """Give a request no more tokens until it is resumed."""
        if request.id in self.paused:
            return
        self.paused[request.id] = request
        if request.id not in self.running:
            self.waiting.remove(request)
        elif request not in self._leaving:
            self._leaving.append(request)

    def resume(self, request: Request) -> None:
        """Let a request go on, if it is paused: it waits with those that came before and after."""
        if self.paused.pop(request.id, None) and request.id not in self.running:
            self._wait(request)

    @property
    def _in_flight(self) -> bool:
        return any(request.in_flight for request in self.running.values())

    def next_step(self) -> Step:
        """Decide what to do now.

        The step is empty if there are no requests, or if tokens in flight must land first: one
        may end a request, and if none does, a request must be preempted.
        """
        self._set_paused_aside()
        if not (self.running or self.waiting):
            return Step()
        dropped = False
        for _ in range(len(self.running) + 2):
            step = self._decoding()
            if step is None:
                return Step()
            if self.waiting or len(step.decoding) < len(self.running):
                PromptShare(self._config, self._supply, step).fill(self.running, self.waiting)
            if step or self._in_flight:
                return step
            # No request can go on: each of several has too few blocks for its prompt, or the
            # only one shares a block with the prefix cache and would have to copy it.
            if len(self.running) > 1:
                self._preempt_newest()
            elif not dropped:
                self._supply.drop_prefixes()
                if self.waiting:
                    self.waiting[0].waits_for = 0  # it was counted with a prefix to copy
                dropped = True
        # An admitted request that does not even fit alone is a fault of the engine.
        request = next(iter(self.running.values()), None) or self.waiting[0]
        raise OutOfBlocks(
            needed=self._supply.needed(request.session, request.pending),
            free=self._supply.available,
            where=f"the cache, with request {request.id} alone,",
        )

    def _decoding(self) -> Step | None:
        """Return a step of all requests that have one token to store, preempting some if necessary.

        This returns None if it would have to preempt while tokens are in flight, since these may
        end a request: nothing is preempted or admitted until they have landed.
        """
        while True:
            decoding = []
            blocks = 0
            for request in self.running.values():
                if request.may_decode:
                    session = request.session
                    decoding.append(request)
                    if session.stored >= session.room:
                        blocks += self._supply.needed(session, 1)
            available = self._supply.available
            if blocks <= available:
                return Step(decoding, blocks=blocks, spare=available - blocks)
            if self._in_flight:
                return None
            if len(self.running) == 1:
                return Step()
            self._preempt_newest()

    def start_over(self) -> None:
        """Preempt all running requests."""
        while self.running:
            self._preempt_newest()

    def _preempt_newest(self) -> None:
        self.num_preemptions += 1
        self._set_aside(self.running.pop(max(self.running)))

    def _set_paused_aside(self) -> None:
        for request in [each for each in self._leaving if not each.in_flight]:
            self._leaving.remove(request)
            if self.running.pop(request.id, None):  # or it was preempted meanwhile
                self._set_aside(request)

    def _set_aside(self, request: Request) -> None:
        """Take all blocks of a request that ran. The prefix cache may keep what is in them."""
        self._supply.give_back(request)
        request.preempted += 1
        if request.id not in self.paused:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        """Queue a request that ran before, in front of all that came after it."""
        later = (at for at, other in enumerate(self.waiting) if other.id > request.id)
        self.waiting.insert(next(later, len(self.waiting)), request)


def looked_at(config: EngineConfig) -> int:
    """Return how many of the waiting requests a step may choose among."""
    return max(_WINDOW, config.prefill_max_batch_size)


class PromptShare:
    """The part of a step that goes to prompts: first to those begun, then to new ones."""

    def __init__(self, config: EngineConfig, supply: BlockSupply, step: Step) -> None:
        self.config = config
        self.supply = supply
        self.step = step
        self.tokens = config.prefill_max_tokens
        self.prompts = config.prefill_max_batch_size
        self.blocks = supply.available - step.blocks
        """Blocks that are promised to nobody. A prompt is promised all that it will take when it
        is admitted, so that prompts do not run each other out of blocks half way."""

    def fill(self, running: MutableMapping[int, Request], waiting: deque[Request]) -> None:
        for request in running.values():
            pending = request.pending
            if pending > 1:
                promised = self.supply.needed(request.session, pending)
                self._store(request, pending, self.blocks)
                self.blocks -= promised
        first_come = self.config.prefill_admission_policy == "fifo"
        skipped: list[Request] = []
        most_passed_over = 0
        """How often one of them was."""
        for request in list(islice(waiting, looked_at(self.config))):
            if min(self.tokens, self.prompts, self.blocks) < 1 or (skipped and first_come):
                break
            if len(running) >= self.config.max_batch_size:
                break
            if most_passed_over >= _PATIENCE:
                break
            if self._admit(request, whole=not first_come and request.passed_over < _PATIENCE):
                waiting.remove(request)
                running[request.id] = request
                self.step.overtaken += len(skipped)
                for other in skipped:
                    other.passed_over += 1
                    most_passed_over = max(most_passed_over, other.passed_over)
            else:
                skipped.append(request)
                most_passed_over = max(most_passed_over, request.passed_over)
        self.step.spare = self.blocks

    def _admit(self, request: Request, *, whole: bool) -> bool:
        """Begin a prompt if there is room for all of it.

        With ``whole`` it must fit into this step too, unless the step has no other prompt yet.
        """
        if request.waits_for > self.blocks:
            return False
        before = self.supply.available
        self.supply.start(request)
        held = before - self.supply.available
        pending = request.pending
        needed = self.supply.needed(request.session, pending)
        has_room = held + needed <= self.blocks and self._count(pending) > 0
        too_long = whole and pending > self.tokens and not self._untouched
        if not has_room:
            request.waits_for = held + needed
        elif too_long:
            request.passed_over += 1
        if not has_room or too_long:
            self.supply.give_back(request)
            return False
        self._store(request, pending, self.blocks - held)
        self.blocks -= held + needed
        return True

    def _store(self, request: Request, pending: int, blocks: int) -> None:
        """Add as much of a prompt to the step as the limits allow."""
        count = self._count(pending)
        needed = self.supply.needed(request.session, count)
        if not count or needed > blocks:
            return
        self.step.chunks.append((request, count))
        self.step.blocks += needed
        self.tokens -= count
        self.prompts -= 1

    def _count(self, pending: int) -> int:
        """Return how many tokens of a prompt this step may store."""
        if self.prompts < 1 or self.tokens < 1:
            return 0
        if self.config.chunked_prefill:
            return min(pending, self.tokens)
        return pending if self._untouched or pending <= self.tokens else 0

    @property
    def _untouched(self) -> bool:
        """True if the step has no prompt yet."""
        return self.tokens == self.config.prefill_max_tokens
