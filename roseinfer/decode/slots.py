"""Which sequence has which row on the device, and which rows must be uploaded again.

The host uploads a row only when it changed in a way that the device cannot know. Only the device
knows the last token: the host may be some steps behind.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.distributed.orders import PutBlocks, PutRows, PutTokens
from roseinfer.distributed.ranks import leader_of
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.transfers import lasting
from roseinfer.paths import Work
from roseinfer.sampling.batch import SamplingBatch
from roseinfer.sampling.logits import EVERY, AllowedRows, Penalties, signed64, tally_of, words_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks
    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams

# Rows on the device, one for each slot, with all numbers that a decode step needs of a sequence.
#
# A row says where a sequence's blocks are, how long it is and how its tokens are chosen. All of its
# numbers are 64 bits wide, so that one copy brings a whole row. Where several ranks compute a
# model, the leader's rows are told to the others.


class SlotFields(NamedTuple):
    """The numbers in front of a row's blocks, in order. Floats are given by their bits."""

    length: int = 0
    """How many tokens are stored."""
    active: int = 0
    """1 where a sequence has the row, 0 for padding."""
    seed: int = 0
    temperature: int = 0
    top_k: int = 0
    top_p: int = 0
    min_p: int = 0

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> SlotFields:
        """Return the fields of a sequence's row, but for its length."""
        return cls(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )


def _bits(value: float) -> int:
    """Return the bits of a 32-bit float."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


_COLUMN = SlotFields(*range(len(SlotFields._fields)))
"""The column of each field."""
BLOCKS_BEGIN = len(_COLUMN)
"""The column at which a row's blocks begin."""


class SlotRows:
    """The rows, and the newest token of each."""

    def __init__(
        self,
        num_slots: int,
        width: int,
        groups: int,
        staging: IndexStaging,
        ranks: Ranks | None = None,
    ) -> None:
        """``width`` is how many blocks a row has room for in each of the ``groups`` of layers."""
        self.width, self.groups = width, groups
        self.pitch = BLOCKS_BEGIN + width * groups
        self._staging = staging
        self.ranks = ranks
        """Those that compute the model together, where there are several."""
        self._led = leader_of(ranks)
        """The ranks, where this one leads them."""
        with lasting():
            shape = num_slots, self.pitch
            self._rows = torch.zeros(shape, dtype=torch.int64, device=staging.device)
            self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=staging.device)
            """The newest token of each row, which is not stored yet."""
        self._flat = self._rows.view(-1)
        self.padding = [*SlotFields(), *[SCRATCH] * (width * groups)]
        """The numbers of a row that no sequence has."""

    @classmethod
    def of(
        cls, num_slots: int, model: CausalModel, kv: KVBlockManager, staging: IndexStaging
    ) -> Self:
        """Make rows for the longest sequences that a model takes."""
        width = -(-model.shape.max_length // kv.block_size)
        return cls(num_slots, width, len(kv.groups), staging, model.ranks)

    def table_of(self, session: InferenceSession, width: int | None = None) -> list[int]:
        """Return a session's blocks as a row has them, padded to ``width`` in each group."""
        table: list[int] = []
        for blocks in session.block_lists:
            table += [*blocks, *[SCRATCH] * ((width or self.width) - len(blocks))]
        return table

    def put(self, flat: list[int], count: int) -> None:
        """Replace rows, given as each one's slot and its numbers, one after the other.

        All may be shorter than a row, by the same number of numbers: the device keeps its own.
        """
        if self._led is not None:
            self._led.tell(PutRows(flat, count))
        rows = self._staging.stage([flat]).columns[0].view(count, -1)
        self._rows[:, : rows.shape[1] - 1].index_copy_(0, rows[:, 0], rows[:, 1:])
        self._staging.work_counts[Work.TABLE_ROWS] += count

    def put_numbers(self, places: list[int], numbers: list[int], rows: int) -> None:
        """Replace single numbers of so many rows; places count on from one row to the next."""
        if self._led is not None:
            self._led.tell(PutBlocks(places, numbers))
        at, values = self._staging.stage([places, numbers]).columns
        self._flat.index_copy_(0, at, values)
        self._staging.work_counts[Work.TABLE_ROWS] += rows

    def put_tokens(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Set the newest token of some rows; all ranks take those that the leader has."""
        if self._led is not None:
            self._led.tell(PutTokens(list(slots)))
        if self.ranks is not None:
            self.ranks.share(tokens)
        at = self._staging.stage([list(slots)]).columns[0]
        self.tokens.index_copy_(0, at, tokens)

    def begin_with(self, tokens: list[int]) -> None:
        """Set the newest tokens of the first rows, which the host knows."""
        self.tokens[: len(tokens)] = self._staging.stage([tokens]).columns[0]

    def share_tokens(self, count: int) -> None:
        """Have all ranks take the tokens that the leader has chosen for the first rows."""
        if self.ranks is not None:
            self.ranks.share(self.tokens[:count])

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Make all rows padding, and put everything back afterwards."""
        rows, tokens = self._rows.clone(), self.tokens.clone()
        self._rows.zero_()
        try:
            yield
        finally:
            self._rows.copy_(rows)
            self.tokens.copy_(tokens)

    def lengths(self, count: int) -> Tensor:
        """Return how many tokens each of the first rows has stored."""
        return self._rows[:count, _COLUMN.length]

    def active(self, count: int) -> Tensor:
        """Return 1 for each of the first rows that a sequence has, 0 for padding."""
        return self._rows[:count, _COLUMN.active]

    def tables(self, count: int) -> list[Tensor]:
        """Return the blocks of each of the first rows, for every group of layers."""
        begins = range(BLOCKS_BEGIN, self.pitch, self.width)
        return [self._rows[:count, begin : begin + self.width] for begin in begins]

    def sampling(
        self, count: int, *, greedy: bool, penalties: Penalties | None = None
    ) -> SamplingBatch:
        """Return the sampling parameters of the first rows, as views of them."""
        rows = self._rows[:count]
        floats = rows.view(torch.float32)[:, ::2]  # the lower half of each 64 bits
        return SamplingBatch(
            temperature=floats[:, _COLUMN.temperature, None],
            top_k=rows[:, _COLUMN.top_k, None],
            top_p=floats[:, _COLUMN.top_p, None],
            min_p=floats[:, _COLUMN.min_p, None],
            seeds=rows[:, _COLUMN.seed, None],
            greedy=greedy,
            penalties=penalties,
        )


@dataclass(slots=True)
class _Occupant:
    session: InferenceSession
    fields: SlotFields
    """The fields of its row, except for the length, which grows."""
    known: int = 0
    """The device knows so many of its blocks; only the last of them may have changed."""


class DecodeSlots:
    """The sequences that have rows. A row without one is padding: its length stays 0, and all its
    blocks are the scratch block."""

    def __init__(self, rows: SlotRows) -> None:
        self.rows = rows
        num_slots = len(rows.tokens)
        self._occupants: list[_Occupant | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._changed: dict[int, None] = {}
        """Rows to upload whole."""
        self._grown: dict[int, None] = {}
        """Rows to upload the last blocks of."""

    @property
    def extent(self) -> int:
        """How many rows there are up to the last one that a sequence has."""
        taken = (at for at in range(len(self._occupants), 0, -1) if self._occupants[at - 1])
        return next(taken, 0)

    def take(self, session: InferenceSession, params: SamplingParams, seed: int) -> int:
        """Give the session the lowest free row, and return it."""
        fields = SlotFields.of(params, seed)  # may raise: no row is taken yet
        slot = heappop(self._free)
        self._occupants[slot] = _Occupant(session, fields)
        self._changed[slot] = None
        return slot

    def give_back(self, slot: int) -> None:
        self._occupants[slot] = None
        self._changed[slot] = None
        heappush(self._free, slot)

    def clear(self) -> None:
        """Free all rows and upload them anew, since nobody knows what the device has of them."""
        slots = range(len(self._occupants))
        self._occupants = [None] * len(slots)
        self._free = list(slots)
        self._changed = dict.fromkeys(slots)
        self._grown.clear()

    def touch(self, slot: int) -> None:
        """Note that a row's session has new blocks, or a copy of its last one."""
        self._grown[slot] = None

    def upload(self) -> None:
        """Upload what has changed, as the sessions are now."""
        if self._changed:
            self._upload_rows()
        if self._grown:
            self._upload_blocks()

    def _upload_rows(self) -> None:
        rows = self.rows
        flat: list[int] = []
        for slot in self._changed:
            self._grown.pop(slot, None)
            occupant = self._occupants[slot]
            if occupant is None:
                flat += [slot, *rows.padding]
                continue
            session = occupant.session
            occupant.known = len(session.block_lists[0])
            fields = occupant.fields._replace(length=session.stored)
            flat += [slot, *fields, *rows.table_of(session)]
        rows.put(flat, len(self._changed))
        self._changed.clear()

    def _upload_blocks(self) -> None:
        """Upload new blocks alone: the device counts the lengths itself."""
        rows = self.rows
        places: list[int] = []
        numbers: list[int] = []
        for slot in self._grown:
            occupant = self._occupants[slot]
            assert occupant is not None
            first = max(0, occupant.known - 1)
            begin = slot * rows.pitch + BLOCKS_BEGIN
            for blocks in occupant.session.block_lists:
                places += range(begin + first, begin + len(blocks))
                numbers += blocks[first:]
                begin += rows.width
            occupant.known = len(occupant.session.block_lists[0])
        rows.put_numbers(places, numbers, len(self._grown))
        self._grown.clear()


# Which tokens the guides of sequences that have slots allow next.


class SlotGuides:
    """A row of bits for every slot. Where no guide is followed, it allows all tokens."""

    def __init__(self, num_slots: int, vocabulary: int, staging: IndexStaging) -> None:
        self._staging = staging
        self._rows = AllowedRows(num_slots, vocabulary, staging.device)
        with lasting():
            shape = num_slots, words_for(vocabulary)
            self.allowed = torch.full(shape, EVERY, dtype=torch.int32, device=staging.device)

    def upload(self, guides: Mapping[int, GuideProgress]) -> None:
        """Bring what guides allow by now to the device, ahead of the step that will choose.

        They go by the numbers of slots.
        """
        (slots,) = self._staging.stage([list(guides)]).columns
        self.allowed.index_copy_(0, slots, self._rows.write(list(guides.values())))

    def end(self, slot: int) -> None:
        """Allow all tokens there again. This does not disturb steps in flight."""
        self.allowed[slot].fill_(EVERY)

    def clear(self) -> None:
        self.allowed.fill_(EVERY)


# The penalties of sequences that have slots, and tallies of their tokens, kept by the steps.


class SlotPenalties:
    """A row of penalties and a tally of all tokens for every slot.

    Those of a slot count from ``begin`` to ``end``. In between nothing is taken off, whatever is
    tallied there.
    """

    def __init__(self, num_slots: int, vocabulary: int, staging: IndexStaging) -> None:
        self._staging = staging
        device = staging.device
        with lasting():
            self.tallies = torch.zeros((num_slots, vocabulary), dtype=torch.int32, device=device)
            self._none = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device=device)
            self.rows = self._none.repeat(num_slots, 1)

    def begin(
        self, slot: int, params: SamplingParams, token_ids: Sequence[int], prompted: int
    ) -> None:
        """Tally what a sequence has, but for its newest token: the next step counts that."""
        stage = self._staging.stage
        tally = tally_of(token_ids, prompted)
        tokens, counts = stage([list(tally), list(tally.values())]).columns
        row = self.tallies[slot]
        row.zero_()
        row.index_copy_(0, tokens, counts.int())
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        (bits,) = stage([list(struct.unpack("<3q", struct.pack("<3d", *penalties)))]).columns
        self.rows[slot].copy_(bits.view(torch.float64))

    def end(self, slot: int) -> None:
        """Take no penalties there any more. This does not disturb steps in flight."""
        self.rows[slot].copy_(self._none)

    def clear(self) -> None:
        self.rows.copy_(self._none)

    def tally(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Count the token that each of the first slots stores now, and return their tallies."""
        tallies = self.tallies[: len(tokens)]
        return tallies.scatter_add_(1, tokens[:, None], active[:, None].int())

    def columns(self, count: int) -> Penalties:
        """Return the penalties of the first slots, as views of them."""
        rows = self.rows[:count]
        return Penalties(rows[:, 0:1], rows[:, 1:2], rows[:, 2:3])
