"""Decode steps that the host launches without knowing the tokens of the steps before."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.decode.row_steps import RowSteps
from roseinfer.decode.slot_guides import SlotGuides
from roseinfer.decode.slot_penalties import SlotPenalties
from roseinfer.decode.slot_rows import SlotRows
from roseinfer.decode.slots import DecodeSlots
from roseinfer.decode.step_kind import StepKind, tops_told
from roseinfer.engine_paths import EnginePath
from roseinfer.errors import ConfigError
from roseinfer.kv.sequence import reserve
from roseinfer.ranks.orders import Decode
from roseinfer.ranks.ranks import leader_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.readback import Arrival
    from roseinfer.guided.guide_progress import GuideProgress
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams


_LOG = logging.getLogger("roseinfer")
_SOON = 16
"""A sequence may be given its next block so many tokens before the last is full."""


class Entrant(NamedTuple):
    """A sequence that is to have a slot."""

    session: InferenceSession
    """It has all tokens but the newest, which only the device knows."""
    params: SamplingParams
    seed: int
    most: int
    """How many tokens it may come to store."""
    prompted: int
    """How many of its tokens are its prompt's."""
    guide: GuideProgress | None = None
    """What rules out tokens: by the time of a step, it knows all tokens before the next one."""


@dataclass(slots=True)
class Resident:
    """A sequence that has a slot, and so its state on the device."""

    session: InferenceSession
    slot: int
    params: SamplingParams
    most: int
    """How many tokens it may come to store."""
    guide: GuideProgress | None


class ResidentDecode:
    """Runs the decode steps of residents."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        num_slots: int,
        *,
        graphs: bool,
        graphs_required: bool = False,
    ) -> None:
        self._kv = kv = attention.kv
        self._path_counts = attention.path_counts
        try:
            self.rows = SlotRows.of(num_slots, model, kv, attention.staging)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"max_batch_size={num_slots}: {kv.device} has no memory for the state of so many "
                "requests: ask for fewer, or leave resident_decode off"
            ) from error
        self.slots = DecodeSlots(self.rows)
        self._ranks = leader_of(model.ranks)
        self._staging = attention.staging
        self._whole_up_to = model.whole_steps
        sizes = ladder(num_slots)
        self.steps = RowSteps(model, attention, self.rows, sizes)
        """They have what penalties and guides need when the first request with one has come."""
        self._num_slots = num_slots
        self._lacks_memory = False
        self._asked = Counter[str]()
        """How many residents ask for more than the least that a step does, by what it is."""
        self.kind = StepKind(greedy=True)
        """What the next step will do, by what the residents ask for."""
        self.captured = graphs and self.steps.capture(sizes, required=graphs_required)
        """True if steps are graphs."""

    def takes(self, params: SamplingParams, vocabulary: int) -> bool:
        """Return True for a request that can decode here, with logits as wide as ``vocabulary``.

        One with penalties or a guide cannot where the device has no memory for that.
        """
        steps = self.steps
        try:
            if params.penalised and steps.penalties is None and not self._lacks_memory:
                steps.penalties = SlotPenalties(self._num_slots, vocabulary, self._staging)
            if params.guide is not None and steps.guides is None and not self._lacks_memory:
                steps.guides = SlotGuides(self._num_slots, vocabulary, self._staging)
        except (RuntimeError, MemoryError):
            self._lacks_memory = True
            _LOG.warning(
                "requests with penalties or guides decode by themselves, one step at a time: %s "
                "has no memory to tally the tokens of %d requests",
                self._kv.device,
                self._num_slots,
            )
        tallies = not params.penalised or steps.penalties is not None
        return tallies and (params.guide is None or steps.guides is not None)

    def enter(self, entering: Sequence[Entrant], tokens: Tensor) -> list[Resident]:
        """Give slots to sessions; ``tokens`` are their newest."""
        residents = []
        for session, params, seed, most, prompted, guide in entering:
            slot = self.slots.take(session, params, seed)
            residents.append(Resident(session, slot, params, most, guide))
            self._note(params, 1)
            if params.penalised and self.steps.penalties is not None:
                self.steps.penalties.begin(slot, params, session.token_ids, prompted)
        # The room behind a prompt in its last block is the session's own already.
        size = self._kv.block_size
        begun = [each for each in residents if each.session.stored % size]
        self._reserve(begun, [size - each.session.stored % size for each in begun])
        self.rows.put_tokens([each.slot for each in residents], tokens.clamp(min=0))
        return residents

    def leave(self, resident: Resident) -> None:
        """Give up a slot. This does not disturb steps in flight."""
        self.slots.give_back(resident.slot)
        self._note(resident.params, -1)
        if resident.params.penalised and self.steps.penalties is not None:
            self.steps.penalties.end(resident.slot)
        if resident.guide is not None and self.steps.guides is not None:
            self.steps.guides.end(resident.slot)

    def clear(self) -> None:
        """Take all slots back, also those of a call of ``enter`` that broke off."""
        self.slots.clear()
        if self.steps.penalties is not None:
            self.steps.penalties.clear()
        if self.steps.guides is not None:
            self.steps.guides.clear()
        self._asked.clear()
        self.kind = StepKind(greedy=True)

    def _note(self, params: SamplingParams, more: int) -> None:
        """Note that a request has come, or gone, and what steps do from now on."""
        asked = self._asked
        asked["drawn"] += more * (params.temperature != 0)
        asked["penalised"] += more * params.penalised
        asked["guided"] += more * (params.guide is not None)
        asked["told"] += more * params.logprobs
        asked["tops"] += more * (params.top_logprobs > 0)
        self.kind = StepKind(
            greedy=not asked["drawn"],
            penalised=asked["penalised"] > 0,
            guided=asked["guided"] > 0,
            tops=tops_told(told=asked["told"] > 0, tops=asked["tops"] > 0),
        )

    def launch(self, residents: Sequence[Resident], early_blocks: int) -> Arrival:
        """Launch a step for all that have a slot; what arrives is indexed by slot.

        A session that needs a block for its token is given one, and room for all tokens until that
        block is full. Up to ``early_blocks`` more go to sessions that will soon need one.
        """
        due = self._due(residents, early_blocks)
        self._reserve(due, [self._kv.block_size] * len(due))
        if self.kind.guided and self.steps.guides is not None:
            self.steps.guides.upload({each.slot: each.guide for each in residents if each.guide})
        self.slots.upload()
        extent = self.slots.extent
        count = self.steps.size_for(extent)
        kind = self.kind
        if count == 1 and self._whole_up_to and residents[0].session.stored >= self._whole_up_to:
            kind = kind._replace(long=True)
        if self._ranks is not None:
            self._ranks.tell(Decode(count, kind))
        self.steps.run(count, kind)
        for each in residents:
            each.session.stored += 1
        self._path_counts[EnginePath.RESIDENT] += 1
        return self.steps.read_back(extent)

    def told(self) -> Arrival:
        """Copy what the step launched last tells of its tokens, which its kind must ask for."""
        assert self.kind.tops is not None
        return self.steps.told(self.slots.extent, self.kind.tops)

    def _due(self, residents: Sequence[Resident], early_blocks: int) -> list[Resident]:
        """Find the sequences that need a block now, and a few of those that soon will.

        Sequences that began together fill their blocks together: serving all of them in one step
        would be felt as a pause. Others come one after the other: blocks for a few take little
        longer than for one, so these wait for each other.
        """
        soon = [each for each in residents if each.session.room - each.session.stored < _SOON]
        due = [each for each in soon if each.session.stored >= each.session.room]
        if early_blocks and len(soon) > len(due):
            early = [each for each in soon if each.session.stored < each.session.room < each.most]
            most = min(-(-len(residents) // _SOON), early_blocks // len(self._kv.groups))
            if due or len(early) >= most:
                due += early[:most]
        return due

    def _reserve(self, residents: Sequence[Resident], counts: Sequence[int]) -> None:
        if not residents:
            return
        reserve(self._kv, [each.session for each in residents], counts)
        for each in residents:
            self.slots.touch(each.slot)


def ladder(most: int) -> list[int]:
    """Return the sizes of steps: each is at most twice the last, and large ones are 32 apart."""
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    sizes += [size for size in (*range(16, 64, 16), *range(64, most, 32)) if size < most]
    return [*sizes, most]
