"""Which sequence has which row on the device, and which rows must be uploaded again.

The host uploads a row only when it changed in a way that the device cannot know. Only the device
knows the last token: the host may be some steps behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from roseinfer.decode.slot_rows import BLOCKS_BEGIN, SlotFields

if TYPE_CHECKING:
    from roseinfer.decode.slot_rows import SlotRows
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.sampling_params import SamplingParams


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
