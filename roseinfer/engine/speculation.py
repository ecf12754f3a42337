"""Speculation: several tokens of a request are verified in one step, and wrong ones rolled back.

A draft is accepted if it is the token that the request would have got at its place anyway: the
likeliest one, or the one drawn by the request's own seed and position. So a text is the same as
without speculation, and only the number of steps differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.engine.drafter import MOST_DRAFTS, Drafter
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from roseinfer.engine.request import BlockSupply, Request
    from roseinfer.engine.runner import StepRunner
    from roseinfer.engine.scheduler import Step
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.sampling_params import SamplingParams

_EVERY_IN_SLOTS = 8
"""Looking takes some microseconds, and steps of slots are short."""


class Speculation:
    """Decides which requests are drafted, and settles what became of their drafts."""

    def __init__(
        self,
        kv: KVBlockManager,
        supply: BlockSupply,
        runner: StepRunner,
        path_counts: Counter[str],
        *,
        slots: bool,
    ) -> None:
        self._kv = kv
        self._supply = supply
        self._runner = runner
        self._path_counts = path_counts
        self._slots = slots
        self.num_drafts = 0
        """How often some tokens of a request were drafted."""
        self.num_drafted = 0
        """How many tokens."""
        self.accepted_at = [0] * MOST_DRAFTS
        """How often the first token of a draft was accepted, the second and so on."""

    def drafter_for(self, params: SamplingParams) -> Drafter | None:
        """Return a drafter for a request, or None for one that is never drafted.

        Penalties and guides depend on the tokens before, and so on each draft: such a request has
        none.
        """
        if params.penalised or params.guide is not None:
            return None
        # The step behind a prompt would have to wait for its token, so slots come first.
        return Drafter(every=_EVERY_IN_SLOTS if self._slots else 1, drafting=not self._slots)

    def plan(self, step: Step) -> None:
        """Add drafts to a step, in blocks that nobody else needs.

        A request in a slot gives it up if its text repeats itself. Its drafts must wait for its
        tokens in flight.
        """
        for request in list(step.decoding):
            drafter = request.drafter
            if drafter is None or not drafter.wakes(request.session.token_ids):
                continue
            if request.resident is not None:
                step.blocks += self._leave_slot(request)
            if request.in_flight:
                step.decoding.remove(request)
                continue
            most, blocks = self._room(request, step.spare)
            drafts = drafter.draft(request.session.token_ids, most)
            if drafts:
                step.drafts[request.id] = drafts
                step.blocks += blocks
                step.spare -= blocks

    def _leave_slot(self, request: Request) -> int:
        """Take the request out of its slot, and return how many blocks its next token takes more.

        A block that it was given early is given up with the slot.
        """
        session = request.session
        had_room = session.stored < session.room
        self._runner.give_up_slot(request)
        session.roll_back(self._kv, session.stored)
        return self._supply.needed(session, 1) if had_room and session.stored >= session.room else 0

    def _room(self, request: Request, spare: int) -> tuple[int, int]:
        """Return how many drafts a step can store for a request, and the blocks they may take."""
        most = min(MOST_DRAFTS, request.full_length - len(request.session.token_ids) - 1)
        while (blocks := self._supply.needed_behind(request.session, most)) > spare and most:
            most -= 1
        return most, blocks

    def settle(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        """Roll back the drafts that were not accepted. The request has none of the tokens yet."""
        refused = len(drafts) - accepted
        if refused:
            session = request.session
            session.roll_back(self._kv, session.stored - refused)
        self.num_drafts += 1
        self.num_drafted += len(drafts)
        for place in range(accepted):
            self.accepted_at[place] += 1
        counts = self._path_counts
        counts[EnginePath.DRAFTED] += len(drafts)
        counts[EnginePath.ACCEPTED] += accepted
        counts[EnginePath.REJECTED] += refused
        if request.drafter is not None:
            length = len(request.session.token_ids) + accepted + 1
            request.drafter.note_verdict(accepted, len(drafts), length)
