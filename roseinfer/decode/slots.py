"""Decode slots: one row of state on the device for each sequence that decodes.

The host uploads a row only when it changed in a way that the device cannot compute. Only the device
knows the newest token: the host may lag by some steps.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.distributed.ranks import (
    PutBlocks,
    PutFirstTokens,
    PutRows,
    PutTokens,
    as_leader,
)
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.transfers import outside_inference_mode
from roseinfer.paths import EnginePath, Work
from roseinfer.sampling import (
    ALL_TOKENS_ALLOWED,
    Penalties,
    SamplingBatch,
    TokenBitmaskBuffer,
    bitmask_words,
    count_prompt_and_output,
    signed64,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from torch import Tensor

    from roseinfer.distributed.ranks import Ranks
    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import CachedSequence
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.models.causal import CausalModel
    from roseinfer.sampling_params import SamplingParams

# Rows on the device, one per slot: a sequence's length, sampling parameters and block tables.
#
# All numbers are 64 bits wide, so that one copy uploads a whole row. Where several ranks compute a
# model, the leader sends its rows to the others.


class SlotFields(NamedTuple):
    """Numbers before a row's blocks, in order. Floats are stored as their bits."""

    length: int = 0
    """Stored tokens."""
    active: int = 0
    """1 for the row of a sequence, 0 for padding."""
    seed: int = 0
    temperature: int = 0
    top_k: int = 0
    top_p: int = 0
    min_p: int = 0

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> SlotFields:
        """Return the fields of a sequence's row, except for its length."""
        return cls(
            active=1,
            seed=signed64(seed),
            temperature=_bits(params.temperature),
            top_k=params.top_k,
            top_p=_bits(params.top_p),
            min_p=_bits(params.min_p),
        )


def _bits(value: float) -> int:
    """Return the bits of ``value`` as a 32-bit float."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


_COLUMN = SlotFields(*range(len(SlotFields._fields)))
"""Column of each field."""
FIRST_BLOCK_COLUMN = len(_COLUMN)
"""First column of a row's blocks."""


class SlotRows:
    """Rows on the device, and the newest token of each."""

    def __init__(
        self,
        num_slots: int,
        width: int,
        groups: int,
        staging: IndexStaging,
        ranks: Ranks | None = None,
        path: EnginePath = EnginePath.RESIDENT,
    ) -> None:
        """Allocate rows with room for ``width`` blocks in each of ``groups`` groups of layers.

        Ranks tell their rows apart by the ``path`` of the steps over them.
        """
        self.blocks_per_group, self.num_groups = width, groups
        self.row_stride = FIRST_BLOCK_COLUMN + width * groups
        self._staging = staging
        self.path = path
        self.ranks = ranks
        """Ranks that compute the model together; None for a single one."""
        self._led_ranks = as_leader(ranks)
        """The same ranks if this process leads them, else None."""
        with outside_inference_mode():
            shape = num_slots, self.row_stride
            self._rows = torch.zeros(shape, dtype=torch.int64, device=staging.device)
            self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=staging.device)
            """Newest token of each row, not stored yet."""
        self._flat = self._rows.view(-1)
        self.padding_row = [*SlotFields(), *[SCRATCH] * (width * groups)]
        """Numbers of a padding row."""

    @classmethod
    def of(
        cls,
        num_slots: int,
        model: CausalModel,
        kv: KVBlockManager,
        staging: IndexStaging,
        path: EnginePath,
    ) -> Self:
        """Make rows with room for sequences of the model's maximum length."""
        width = -(-model.shape.max_length // kv.block_size)
        return cls(num_slots, width, len(kv.groups), staging, model.ranks, path)

    def padded_block_table(self, sequence: CachedSequence, width: int | None = None) -> list[int]:
        """Return a sequence's blocks as stored in a row: padded to ``width`` in each group."""
        table: list[int] = []
        for blocks in sequence.block_lists:
            table += [*blocks, *[SCRATCH] * ((width or self.blocks_per_group) - len(blocks))]
        return table

    def put_rows(self, flat: list[int], count: int) -> None:
        """Replace ``count`` rows; ``flat`` concatenates each row's slot and numbers.

        All may be shorter than a row, by the same amount: the device keeps the remaining columns.
        """
        if self._led_ranks is not None:
            self._led_ranks.send_command(PutRows(self.path, flat, count))
        rows = self._staging.stage([flat]).columns[0].view(count, -1)
        self._rows[:, : rows.shape[1] - 1].index_copy_(0, rows[:, 0], rows[:, 1:])
        self._staging.work_counts[Work.TABLE_ROWS] += count

    def put_blocks(self, places: list[int], numbers: list[int], rows: int) -> None:
        """Replace single numbers, by flat index over all rows, in ``rows`` rows."""
        if self._led_ranks is not None:
            self._led_ranks.send_command(PutBlocks(self.path, places, numbers))
        at, values = self._staging.stage([places, numbers]).columns
        self._flat.index_copy_(0, at, values)
        self._staging.work_counts[Work.TABLE_ROWS] += rows

    def put_tokens(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Set the newest tokens of some rows; all ranks get the leader's."""
        if self._led_ranks is not None:
            self._led_ranks.send_command(PutTokens(self.path, list(slots)))
        if self.ranks is not None:
            self.ranks.broadcast(tokens)
        at = self._staging.stage([list(slots)]).columns[0]
        self.tokens.index_copy_(0, at, tokens)

    def put_first_tokens(self, tokens: list[int]) -> None:
        """Set the newest tokens of the first rows from the host."""
        if self._led_ranks is not None:
            self._led_ranks.send_command(PutFirstTokens(self.path, tokens))
        self.tokens[: len(tokens)] = self._staging.stage([tokens]).columns[0]

    def broadcast_tokens(self, count: int) -> None:
        """Broadcast the leader's newest tokens of the first rows to all ranks."""
        if self.ranks is not None:
            self.ranks.broadcast(self.tokens[:count])

    @contextmanager
    def all_padding(self) -> Iterator[None]:
        """Make all rows padding within the context, and restore them afterwards."""
        rows, tokens = self._rows.clone(), self.tokens.clone()
        self._rows.zero_()
        try:
            yield
        finally:
            self._rows.copy_(rows)
            self.tokens.copy_(tokens)

    def lengths(self, count: int) -> Tensor:
        """Return the stored tokens of each of the first ``count`` rows."""
        return self._rows[:count, _COLUMN.length]

    def active(self, count: int) -> Tensor:
        """Return 1 for each of the first ``count`` rows that is a sequence's, 0 for padding."""
        return self._rows[:count, _COLUMN.active]

    def tables(self, count: int) -> list[Tensor]:
        """Return the block tables of the first ``count`` rows, one per group of layers."""
        begins = range(FIRST_BLOCK_COLUMN, self.row_stride, self.blocks_per_group)
        return [self._rows[:count, begin : begin + self.blocks_per_group] for begin in begins]

    def sampling(
        self, count: int, *, greedy: bool, penalties: Penalties | None = None
    ) -> SamplingBatch:
        """Return the sampling parameters of the first ``count`` rows, as views of them."""
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
class _SlotState:
    sequence: CachedSequence
    fields: SlotFields
    """Fields of its row, except for the length, which grows."""
    num_uploaded_blocks: int = 0
    """Blocks per group that the device has; only the last of them may have changed."""


class DecodeSlots:
    """Assignment of sequences to rows, and of the rows to upload.

    A row without a sequence is padding: its length stays 0, and all its blocks are the scratch
    block.
    """

    def __init__(self, rows: SlotRows) -> None:
        self.rows = rows
        num_slots = len(rows.tokens)
        self._slot_states: list[_SlotState | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._dirty_rows: dict[int, None] = {}
        """Slots whose rows are to be uploaded whole, as an ordered set."""
        self._rows_with_new_blocks: dict[int, None] = {}
        """Slots whose last blocks are to be uploaded, as an ordered set."""

    @property
    def rows_in_use(self) -> int:
        """Number of rows up to the last one of a sequence."""
        used_rows = (at for at in range(len(self._slot_states), 0, -1) if self._slot_states[at - 1])
        return next(used_rows, 0)

    def assign_slot(self, sequence: CachedSequence, params: SamplingParams, seed: int) -> int:
        """Assign the lowest free slot to a sequence, and return it."""
        fields = SlotFields.of(params, seed)  # first, since it may raise
        slot = heappop(self._free)
        self._slot_states[slot] = _SlotState(sequence, fields)
        self._dirty_rows[slot] = None
        return slot

    def release_slot(self, slot: int) -> None:
        self._slot_states[slot] = None
        self._dirty_rows[slot] = None
        heappush(self._free, slot)

    def clear(self) -> None:
        """Free all slots and mark all rows for upload: their state on the device is unknown."""
        slots = range(len(self._slot_states))
        self._slot_states = [None] * len(slots)
        self._free = list(slots)
        self._dirty_rows = dict.fromkeys(slots)
        self._rows_with_new_blocks.clear()

    def mark_new_blocks(self, slot: int) -> None:
        """Mark a slot whose sequence has new blocks, or a copy of its last one."""
        self._rows_with_new_blocks[slot] = None

    def upload(self) -> None:
        """Upload all marked rows and blocks, as the sequences are now."""
        if self._dirty_rows:
            self._upload_rows()
        if self._rows_with_new_blocks:
            self._upload_blocks()

    def _upload_rows(self) -> None:
        rows = self.rows
        flat: list[int] = []
        for slot in self._dirty_rows:
            self._rows_with_new_blocks.pop(slot, None)
            occupant = self._slot_states[slot]
            if occupant is None:
                flat += [slot, *rows.padding_row]
                continue
            sequence = occupant.sequence
            occupant.num_uploaded_blocks = len(sequence.block_lists[0])
            fields = occupant.fields._replace(length=sequence.num_stored)
            flat += [slot, *fields, *rows.padded_block_table(sequence)]
        rows.put_rows(flat, len(self._dirty_rows))
        self._dirty_rows.clear()

    def _upload_blocks(self) -> None:
        """Upload only new blocks: the device updates the lengths itself."""
        rows = self.rows
        places: list[int] = []
        numbers: list[int] = []
        for slot in self._rows_with_new_blocks:
            occupant = self._slot_states[slot]
            assert occupant is not None
            first = max(0, occupant.num_uploaded_blocks - 1)
            begin = slot * rows.row_stride + FIRST_BLOCK_COLUMN
            for blocks in occupant.sequence.block_lists:
                places += range(begin + first, begin + len(blocks))
                numbers += blocks[first:]
                begin += rows.blocks_per_group
            occupant.num_uploaded_blocks = len(occupant.sequence.block_lists[0])
        rows.put_blocks(places, numbers, len(self._rows_with_new_blocks))
        self._rows_with_new_blocks.clear()


# Token bitmasks of the sequences that have slots.


class SlotGuides:
    """Token bitmask of each slot; it allows all tokens where the sequence has no guide."""

    def __init__(self, num_slots: int, vocabulary: int, staging: IndexStaging) -> None:
        self._staging = staging
        self._rows = TokenBitmaskBuffer(num_slots, vocabulary, staging.device)
        with outside_inference_mode():
            shape = num_slots, bitmask_words(vocabulary)
            self.token_bitmasks = torch.full(
                shape, ALL_TOKENS_ALLOWED, dtype=torch.int32, device=staging.device
            )

    def upload(self, guides: Mapping[int, GuideMatcher]) -> None:
        """Upload the current bitmasks of ``guides``, by slot, before the step that samples."""
        (slots,) = self._staging.stage([list(guides)]).columns
        self.token_bitmasks.index_copy_(0, slots, self._rows.write(list(guides.values())))

    def reset_slot(self, slot: int) -> None:
        """Allow all tokens in a slot again. This does not disturb steps in flight."""
        self.token_bitmasks[slot].fill_(ALL_TOKENS_ALLOWED)

    def clear(self) -> None:
        self.token_bitmasks.fill_(ALL_TOKENS_ALLOWED)


# Penalties of the sequences that have slots, and token counts, which the steps update.


class SlotPenalties:
    """Penalties and counts of all tokens for each slot.

    Those of a slot are valid from ``set_penalties`` to ``reset_slot``. At other times its penalties
    are neutral, whatever its counts.
    """

    def __init__(self, num_slots: int, vocabulary: int, staging: IndexStaging) -> None:
        self._staging = staging
        device = staging.device
        with outside_inference_mode():
            self.token_counts = torch.zeros(
                (num_slots, vocabulary), dtype=torch.int32, device=device
            )
            self._no_penalties = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device=device)
            self.rows = self._no_penalties.repeat(num_slots, 1)

    def set_penalties(
        self, slot: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Set penalties, and count all tokens but the newest, which the next step counts."""
        stage = self._staging.stage
        tally = count_prompt_and_output(token_ids, num_prompt_tokens)
        tokens, counts = stage([list(tally), list(tally.values())]).columns
        row = self.token_counts[slot]
        row.zero_()
        row.index_copy_(0, tokens, counts.int())
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        (bits,) = stage([list(struct.unpack("<3q", struct.pack("<3d", *penalties)))]).columns
        self.rows[slot].copy_(bits.view(torch.float64))

    def reset_slot(self, slot: int) -> None:
        """Make a slot's penalties neutral. This does not disturb steps in flight."""
        self.rows[slot].copy_(self._no_penalties)

    def clear(self) -> None:
        self.rows.copy_(self._no_penalties)

    def count_tokens(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Count the token that each of the first slots stores in this step; return the counts."""
        tallies = self.token_counts[: len(tokens)]
        return tallies.scatter_add_(1, tokens[:, None], active[:, None].int())

    def columns(self, count: int) -> Penalties:
        """Return the penalties of the first ``count`` slots, as views of them."""
        rows = self.rows[:count]
        return Penalties(rows[:, 0:1], rows[:, 1:2], rows[:, 2:3])
