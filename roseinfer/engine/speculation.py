"""Speculative decoding: several drafts of a request are verified in one step.

A draft is accepted if it equals the token that the request would have got at its position anyway:
the argmax, or the token sampled by the request's seed and position. Rejected drafts are rolled
back. So the output is the same as without speculation, and only the number of steps differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.engine.drafter import MAX_DRAFT_TOKENS, Drafter
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from roseinfer.engine.request import Request, RequestBlockAllocator
    from roseinfer.engine.runner import StepRunner
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.sampling_params import SamplingParams

_CHECK_INTERVAL_IN_SLOTS = 8
"""Tokens between two checks of a request in a slot: a check takes some microseconds, and decode
steps of slots are short."""


class Speculation:
    """The speculation of an engine: adds drafts to steps and records their verification."""

    def __init__(
        self,
        kv: KVBlockManager,
        block_allocator: RequestBlockAllocator,
        runner: StepRunner,
        path_counts: Counter[str],
        *,
        slots: bool,
    ) -> None:
        self._kv = kv
        self._block_allocator = block_allocator
        self._runner = runner
        self._path_counts = path_counts
        self._slots = slots
        self.num_drafts = 0
        """Number of drafts, each of one or more tokens."""
        self.num_draft_tokens = 0
        """Number of tokens in all drafts."""
        self.num_accepted_per_position = [0] * MAX_DRAFT_TOKENS
        """Number of accepted tokens at each position of a draft."""

    def drafter_for(self, params: SamplingParams) -> Drafter | None:
        """Return a drafter for a request, or None for one that never drafts.

        Penalties and guides depend on all previous tokens, and so on each draft: requests with
        these never draft.
        """
        if params.has_penalties or params.guide is not None:
            return None
        # With drafts, the step after a prompt would have to wait for its token: begin in a slot.
        return Drafter(
            check_interval=_CHECK_INTERVAL_IN_SLOTS if self._slots else 1, drafting=not self._slots
        )

    def add_drafts(self, step: Step) -> None:
        """Add drafts to a step, in blocks that no other request needs.

        A request in a slot leaves it if its sequence repeats itself. Its drafts must wait for its
        tokens in flight.
        """
        for request in list(step.decoding):
            drafter = request.drafter
            if drafter is None or not drafter.should_draft(request.sequence.token_ids):
                continue
            if request.resident is not None:
                step.max_blocks_needed += self._leave_slot(request)
            if request.num_in_flight:
                step.decoding.remove(request)
                continue
            max_drafts, blocks = self._draft_capacity(request, step.num_spare_blocks)
            drafts = drafter.draft(request.sequence.token_ids, max_drafts)
            if drafts:
                request.drafts = drafts
                step.max_blocks_needed += blocks
                step.num_spare_blocks -= blocks

    def _leave_slot(self, request: Request) -> int:
        """Release the slot of a request, and return how many more blocks its next token needs.

        A block that was allocated early is freed with the slot.
        """
        sequence = request.sequence
        had_room = sequence.num_stored < sequence.token_capacity
        self._runner.release_request_slot(request)
        sequence.roll_back(self._kv, sequence.num_stored)
        return (
            self._block_allocator.count_needed_blocks(sequence, 1)
            if had_room and sequence.num_stored >= sequence.token_capacity
            else 0
        )

    def _draft_capacity(self, request: Request, spare: int) -> tuple[int, int]:
        """Return how many drafts a step can store for a request, and the blocks they may take."""
        max_drafts = min(
            MAX_DRAFT_TOKENS, request.max_total_length - len(request.sequence.token_ids) - 1
        )
        while (
            blocks := self._block_allocator.count_draft_blocks(request.sequence, max_drafts)
        ) > spare and max_drafts:
            max_drafts -= 1
        return max_drafts, blocks

    def record_verification(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        """Roll back rejected drafts and count them. The request has none of the tokens yet."""
        rejected = len(drafts) - accepted
        if rejected:
            sequence = request.sequence
            sequence.roll_back(self._kv, sequence.num_stored - rejected)
        self.num_drafts += 1
        self.num_draft_tokens += len(drafts)
        for position in range(accepted):
            self.num_accepted_per_position[position] += 1
        counts = self._path_counts
        counts[EnginePath.DRAFTED] += len(drafts)
        counts[EnginePath.ACCEPTED] += accepted
        counts[EnginePath.REJECTED] += rejected
        if request.drafter is not None:
            length = len(request.sequence.token_ids) + accepted + 1
            request.drafter.record_acceptance(accepted, len(drafts), length)
