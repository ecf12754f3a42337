"""The penalties of sequences that have slots, and tallies of their tokens, kept by the steps."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from roseinfer.kv.lasting import lasting
from roseinfer.sampling.penalties import Penalties, tally_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kv.storage import IndexStaging
    from roseinfer.sampling_params import SamplingParams


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
