"""Rows on the device that hold all that a decode step needs of each sequence.

A row says where a sequence's blocks are, how long it is and how its tokens are chosen. The host
uploads it only when one of these changed in a way that the device cannot know. Only the device
knows the last token: the host may be some steps behind.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.kv.lasting import lasting
from roseinfer.kv.paths import Work
from roseinfer.kv.pool import SCRATCH
from roseinfer.sampling.noise import signed64
from roseinfer.sampling.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roseinfer.config import SamplingParams
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.sampling.penalties import Penalties


class _Fields(NamedTuple):
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


_COLUMN = _Fields(*range(len(_Fields._fields)))
"""The column of each field."""
_BLOCKS = len(_COLUMN)
"""The column at which a row's blocks begin."""


@dataclass(slots=True)
class _Occupant:
    session: InferenceSession
    fields: _Fields
    """The fields of its row, except for the length, which grows."""
    known: int = 0
    """The device knows so many of its blocks; only the last of them may have changed."""


class DecodeSlots:
    """Rows of numbers, all of them 64 bits wide so that one copy brings a whole row.

    A row without a sequence is padding: its length stays 0, and all its blocks are the scratch
    block.
    """

    def __init__(self, num_slots: int, width: int, groups: int, staging: IndexStaging) -> None:
        """``width`` is how many blocks a row has room for in each group of layers."""
        self._width = width
        self._groups = groups
        self._staging = staging
        device = staging.device
        with lasting():
            self._rows = torch.zeros(
                (num_slots, _BLOCKS + width * groups), dtype=torch.int64, device=device
            )
            self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
            """The newest token of each row, which is not stored yet."""
        self._flat = self._rows.view(-1)
        self._occupants: list[_Occupant | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._changed: dict[int, None] = {}
        """Rows to upload whole."""
        self._grown: dict[int, None] = {}
        """Rows to upload the last blocks of."""

    # ------------------------------------------------------------------------- on the host

    @property
    def extent(self) -> int:
        """How many rows there are up to the last one that a sequence has."""
        taken = (at for at in range(len(self._occupants), 0, -1) if self._occupants[at - 1])
        return next(taken, 0)

    def take(self, session: InferenceSession, params: SamplingParams, seed: int) -> int:
        """Give the session the lowest free row, and return it."""
        fields = _Fields(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )  # may raise: no row is taken yet
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
        flat: list[int] = []
        for slot in self._changed:
            self._grown.pop(slot, None)
            occupant = self._occupants[slot]
            if occupant is None:
                flat += [slot, *_Fields(), *[SCRATCH] * (self._width * self._groups)]
                continue
            session = occupant.session
            occupant.known = len(session.block_lists[0])
            flat += [slot, *occupant.fields._replace(length=session.stored)]
            for blocks in session.block_lists:
                flat += [*blocks, *[SCRATCH] * (self._width - len(blocks))]
        rows = self._staging.stage([flat]).columns[0].view(len(self._changed), -1)
        self._rows.index_copy_(0, rows[:, 0], rows[:, 1:])
        self._staging.work_counts[Work.TABLE_ROWS] += len(self._changed)
        self._changed.clear()

    def _upload_blocks(self) -> None:
        """Upload new blocks alone: the device counts the lengths itself."""
        places: list[int] = []
        numbers: list[int] = []
        for slot in self._grown:
            occupant = self._occupants[slot]
            assert occupant is not None
            first = max(0, occupant.known - 1)
            begin = slot * self._rows.stride(0) + _BLOCKS
            for blocks in occupant.session.block_lists:
                places += range(begin + first, begin + len(blocks))
                numbers += blocks[first:]
                begin += self._width
            occupant.known = len(occupant.session.block_lists[0])
        at, values = self._staging.stage([places, numbers]).columns
        self._flat.index_copy_(0, at, values)
        self._staging.work_counts[Work.TABLE_ROWS] += len(self._grown)
        self._grown.clear()

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

    def put_tokens(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Set the newest token of some rows."""
        at = self._staging.stage([list(slots)]).columns[0]
        self.tokens.index_copy_(0, at, tokens)

    # ----------------------------------------------------------------------- on the device

    def lengths(self, count: int) -> torch.Tensor:
        """Return how many tokens each of the first rows has stored."""
        return self._rows[:count, _COLUMN.length]

    def active(self, count: int) -> torch.Tensor:
        """Return 1 for each of the first rows that a sequence has, 0 for padding."""
        return self._rows[:count, _COLUMN.active]

    def tables(self, count: int) -> list[torch.Tensor]:
        """Return the blocks of each of the first rows, for every group of layers."""
        begins = range(_BLOCKS, self._rows.shape[1], self._width)
        return [self._rows[:count, begin : begin + self._width] for begin in begins]

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


def _bits(value: float) -> int:
    """Return the bits of a 32-bit float."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
