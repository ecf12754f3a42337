"""Rows on the device, one for each slot, with all numbers that a decode step needs of a sequence.

A row says where a sequence's blocks are, how long it is and how its tokens are chosen. All of its
numbers are 64 bits wide, so that one copy brings a whole row. Where several ranks compute a model,
the leader's rows are told to the others.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.kv.lasting import lasting
from roseinfer.kv.paths import Work
from roseinfer.kv.pool import SCRATCH
from roseinfer.ranks.orders import PutBlocks, PutRows, PutTokens
from roseinfer.ranks.ranks import leader_of
from roseinfer.sampling.noise import signed64
from roseinfer.sampling.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from torch import Tensor

    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.kv.sequence import InferenceSession
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.models.causal import CausalModel
    from roseinfer.ranks.ranks import Ranks
    from roseinfer.sampling.penalties import Penalties
    from roseinfer.sampling_params import SamplingParams


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
