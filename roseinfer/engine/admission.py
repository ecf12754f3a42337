"""What a step does for prompts: goes on with those begun, then begins new ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Mapping, MutableMapping

    from roseinfer.config import EngineConfig
    from roseinfer.engine.request import Request
    from roseinfer.engine.scheduler import Step, Supply

_WINDOW = 64
"""Waiting requests to choose among, so that a long queue costs nothing; more only where more
prompts may be begun in a step."""
_PATIENCE = 8
"""Later requests that may be admitted before one that waits."""


@dataclass(slots=True)
class PromptShare:
    """What is left of one step's limits."""

    config: EngineConfig
    supply: Supply
    step: Step
    tokens: int
    prompts: int
    blocks: int
    """Those that nothing was promised of. What a prompt will take is promised when it is let
    in, so that prompts do not run each other out of blocks half way."""

    @classmethod
    def of(cls, config: EngineConfig, supply: Supply, step: Step) -> PromptShare:
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
        """How many of a prompt's tokens this step may store."""
        if self.prompts < 1 or self.tokens < 1:
            return 0
        if self.config.chunked_prefill:
            return min(pending, self.tokens)
        untouched = self.tokens == self.config.prefill_max_tokens
        return pending if untouched or pending <= self.tokens else 0
