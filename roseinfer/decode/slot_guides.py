"""Which tokens the guides of sequences that have slots allow next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.kv.lasting import lasting
from roseinfer.sampling.allowed_tokens import EVERY, AllowedRows, words_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roseinfer.guided.guide_progress import GuideProgress
    from roseinfer.kv.storage import IndexStaging


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
