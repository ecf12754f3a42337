"""Decode steps that the host launches without knowing the tokens of the steps before."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.decode.graphs import StepGraphs, StepKind, tops_told
from roseinfer.decode.readback import Readback
from roseinfer.decode.slots import (
    BLOCKS_BEGIN,
    DecodeSlots,
    SlotFields,
    SlotGuides,
    SlotPenalties,
    SlotRows,
)
from roseinfer.distributed.orders import Decode
from roseinfer.distributed.ranks import leader_of
from roseinfer.errors import ConfigError
from roseinfer.kernels.runtime import why_unusable
from roseinfer.kv.sequence import reserve
from roseinfer.kv.transfers import lasting
from roseinfer.paths import EnginePath
from roseinfer.sampling.logits import only_allowed
from roseinfer.sampling.logprobs import rows_without_a_distribution, tell
from roseinfer.sampling_params import MOST_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.readback import Arrival
    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams

# Steps over rows on the device: each stores the token of its row and chooses the next.


class RowSteps:
    """Runs the model on the first so many rows, as graphs where there are any."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        rows: SlotRows,
        sizes: Sequence[int],
        *,
        drafts: bool = False,
    ) -> None:
        """``sizes`` are those that steps are made in; the last is all rows.

        With ``drafts``, several rows may be of one sequence, one token behind the other.
        """
        self.rows = rows
        self.penalties: SlotPenalties | None = None
        self.guides: SlotGuides | None = None
        self._model = model
        self._attention = attention
        self._path_counts = attention.path_counts
        self._sizes = sizes
        self._drafts = drafts
        device = attention.kv.device
        self._advance: Callable[..., None] | None = None
        """The kernels that end a greedy step, where there are any."""
        if attention.name != "reference" and not why_unusable(device):
            from roseinfer.kernels.triton.greedy import advance_to_likeliest

            self._advance = advance_to_likeliest
        with lasting():
            self.tokens = torch.zeros_like(rows.tokens)
            """The token that the last step chose in each row; -1 where there was none."""
        self._graphs: StepGraphs | None = None
        num_rows = len(rows.tokens)
        self._readback = Readback(num_rows, torch.int64, device)
        self._told_readback = Readback(
            num_rows * (1 + 2 * MOST_TOP_LOGPROBS), torch.float64, device
        )
        self._told: dict[int, Tensor] = {}
        """What the last step told, by how many likeliest tokens it told of."""

    def capture(self, sizes: Sequence[int], *, required: bool) -> bool:
        """Capture plain steps of some sizes, and all others when they are first run.

        This returns False where the model's steps cannot be captured.
        """
        graphs = StepGraphs(self.step, self.rows, self._path_counts)
        if graphs.capture(sizes, required=required):
            self._graphs = graphs
        return self._graphs is not None

    def size_for(self, extent: int) -> int:
        """Return how many rows a step has that is to have the first ``extent``."""
        return next(size for size in self._sizes if size >= extent)

    def run(self, count: int, kind: StepKind) -> None:
        run = self._graphs.run if self._graphs else self.step
        run(count, kind)

    def read_back(self, extent: int) -> Arrival:
        """Copy the tokens that the step launched last chooses in the first rows."""
        return self._readback.start(self.tokens[:extent])

    def told(self, extent: int, tops: int) -> Arrival:
        """Copy what it tells of its tokens, which its kind must ask for.

        It arrives as the numbers of one row after the other, as ``tell`` has them.
        """
        return self._told_readback.start(self._told[tops][:extent].flatten())

    @torch.inference_mode()
    def step(self, count: int, kind: StepKind) -> None:
        """Store the token of each of the first ``count`` rows and choose the next one.

        This needs nothing from the host, so that it can be captured once and replayed.
        """
        rows = self.rows
        for path in self._model.paths:
            self._path_counts[path] += 1
        lengths = rows.lengths(count)
        batch = ResidentBatch(rows.tables(count), lengths, self._drafts, kind.long)
        self._attention.prepare(batch)
        logits = self._model.logits(rows.tokens[:count], lengths, None, self._attention)
        if kind.guided and self.guides is not None:
            self._path_counts[EnginePath.GUIDED] += 1
            logits = only_allowed(logits.float(), self.guides.allowed[:count])
        chosen = self._choose(count, kind, logits, lengths)
        rows.share_tokens(count)
        if kind.tops is not None:
            self._tell(logits, chosen, kind.tops)

    def _choose(self, count: int, kind: StepKind, logits: Tensor, lengths: Tensor) -> Tensor:
        """Choose the next token of each row, and count the one that was stored."""
        rows = self.rows
        if kind.greedy and not kind.penalised and self._advance is not None:
            self._path_counts[EnginePath.LIKELIEST] += 1
            chosen, tokens = self.tokens[:count], rows.tokens[:count]
            self._advance(logits, chosen, tokens, lengths, rows.active(count))
            return chosen
        penalties = tally = None
        if kind.penalised and self.penalties is not None:
            self._path_counts[EnginePath.PENALISED] += 1
            penalties = self.penalties.columns(count)
            tally = self.penalties.tally(rows.tokens[:count], rows.active(count))
        batch = rows.sampling(count, greedy=kind.greedy, penalties=penalties)
        chosen = batch.choose(logits, lengths + 1, tally)
        chosen = torch.where(rows_without_a_distribution(logits), -1, chosen)
        self.tokens[:count] = chosen
        rows.tokens[:count] = chosen.clamp(min=0)
        lengths += rows.active(count)
        return chosen

    def _tell(self, logits: Tensor, chosen: Tensor, tops: int) -> None:
        self._path_counts[EnginePath.TOLD] += 1
        told = tell(logits, chosen, tops)
        if tops not in self._told:
            with lasting():
                shape = len(self.tokens), told.shape[1]
                self._told[tops] = torch.zeros(shape, dtype=told.dtype, device=told.device)
        self._told[tops][: len(chosen)] = told


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


# Several tokens of a text stored in one step: a row for each.
#
# A row decodes as the one of a resident sequence does, so what comes behind a token has the bits
# that it has where tokens come one at a time, and a step can be a CUDA graph.


_LEAST_ROWS = 16
"""Tensor cores take no fewer, so fewer would take as long."""


class Span(NamedTuple):
    """A sequence, and tokens that come behind those it has stored."""

    session: InferenceSession
    params: SamplingParams
    seed: int
    tokens: Sequence[int]


class TokenRows:
    """Stores tokens of several sequences, and chooses the token behind each."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        most_rows: int,
        path: EnginePath,
        *,
        captured: int = 0,
    ) -> None:
        """``path`` counts its steps. Those of up to ``captured`` rows become graphs now.

        If there are some, larger ones become graphs when they are first run.
        """
        self._kv = attention.kv
        self._path_counts = attention.path_counts
        self._path = path
        sizes = _ladder(most_rows)
        rows = SlotRows.of(sizes[-1], model, attention.kv, attention.staging)
        self._rows = rows
        self._steps = RowSteps(model, attention, rows, sizes, drafts=True)
        self._taken = 0
        """How many rows the last step had."""
        self.tokens: Tensor = self._steps.tokens
        """Those that the last step chooses, row by row, on the device."""
        if captured:
            largest = self._steps.size_for(captured)
            self._steps.capture([size for size in sizes if size <= largest], required=False)

    def launch(self, spans: Sequence[Span]) -> tuple[Arrival, Arrival | None]:
        """Store the tokens of all, and choose the one behind each, sequence by sequence.

        This returns the tokens, and what is told of them if some request wants that.
        """
        counts = [len(each.tokens) for each in spans]
        reserve(self._kv, [each.session for each in spans], counts)
        self._upload(spans)
        kind = _kind_of([each.params for each in spans])
        self._steps.run(self._steps.size_for(self._taken), kind)
        for each in spans:
            each.session.stored += len(each.tokens)
        self._path_counts[self._path] += 1
        told = None if kind.tops is None else self._steps.told(self._taken, kind.tops)
        return self._steps.read_back(self._taken), told

    def clear(self) -> None:
        """Upload all rows anew, since nobody knows what the device has of them."""
        self._taken = len(self._rows.tokens)

    def _upload(self, spans: Sequence[Span]) -> None:
        rows = self._rows
        tokens: list[int] = []
        flat: list[int] = []
        width = self._width_of(spans)
        for session, params, seed, own in spans:
            fields = SlotFields.of(params, seed)
            table = rows.table_of(session, width)
            for length in range(session.stored, session.stored + len(own)):
                flat += [len(tokens) + length - session.stored, *fields._replace(length=length)]
                flat += table
            tokens += own
        before, self._taken = self._taken, len(tokens)
        for row in range(self._taken, before):
            flat += [row, *rows.padding[: BLOCKS_BEGIN + width * rows.groups]]
        rows.put(flat, max(before, self._taken))
        rows.begin_with(tokens)

    def _width_of(self, spans: Sequence[Span]) -> int:
        """Return how many blocks each row is given: no others are looked at.

        Where there are several groups of layers, those of the second have their own columns.
        """
        if self._rows.groups > 1:
            return self._rows.width
        return max(len(each.session.block_lists[0]) for each in spans)


def _kind_of(asked: Sequence[SamplingParams]) -> StepKind:
    tops = tops_told(
        told=any(params.logprobs for params in asked),
        tops=any(params.top_logprobs for params in asked),
    )
    return StepKind(greedy=not any(params.temperature for params in asked), tops=tops)


def _ladder(most: int) -> list[int]:
    """Return the sizes of steps, each twice the last, so that few graphs are captured."""
    sizes = [_LEAST_ROWS]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
