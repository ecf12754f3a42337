"""Which tokens the guides of sequences that have slots allow next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.kv.lasting import lasting
from roseinfer.sampling.allowed_tokens import EVERY, AllowedRows, words_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.decode.resident import Resident
    from roseinfer.kv.storage import IndexStaging


class SlotGuides:
    """A row of bits for every slot. Where no guide is followed, it allows all tokens."""

    def __init__(self, num_slots: int, vocabulary: int, staging: IndexStaging) -> None:
        self._staging = staging
        self._rows = AllowedRows(num_slots, vocabulary, staging.device)
        with lasting():
            shape = num_slots, words_for(vocabulary)
            self.allowed = torch.full(shape, EVERY, dtype=torch.int32, device=staging.device)

    def upload(self, residents: Sequence[Resident]) -> None:
        """Bring what guides allow by now to the device, ahead of the step that will choose."""
        guided = [each for each in residents if each.guide is not None]
        (slots,) = self._staging.stage([[each.slot for each in guided]]).columns
        self.allowed.index_copy_(0, slots, self._rows.write([each.guide for each in guided]))

    def end(self, slot: int) -> None:
        """Allow all tokens there again. This does not disturb steps in flight."""
        self.allowed[slot].fill_(EVERY)

    def clear(self) -> None:
        self.allowed.fill_(EVERY)
