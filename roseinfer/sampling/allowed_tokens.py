"""Leaving out tokens that a grammar or the like does not allow next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.guided.guide_progress import GuideProgress

_BITS = 32
EVERY = -1
"""A word that allows all of its tokens."""


def words_for(vocabulary: int) -> int:
    """Return how many words of bits so many tokens take."""
    return -(-vocabulary // _BITS)


def only_allowed(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return logits that are -infinity but for allowed tokens.

    ``allowed`` is int32, ``[rows, words]``, as xgrammar and llguidance make it: bit ``t % 32`` of
    word ``t // 32`` is set if token ``t`` is allowed. Tokens behind the last word are not.
    """
    shifts = torch.arange(_BITS, dtype=torch.int32, device=allowed.device)
    bits = (allowed[:, :, None] >> shifts) & 1
    mask = bits.flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~pad(mask, (0, logits.shape[-1] - mask.shape[-1])), float("-inf"))


class AllowedRows:
    """Asks guides what may come next, and brings it to the device through one buffer."""

    def __init__(self, most: int, vocabulary: int, device: torch.device) -> None:
        """No more than ``most`` rows are written at once."""
        self._transfers = transfers.Transfers(device)
        self._host = self._transfers.host_buffer((most, words_for(vocabulary)), torch.int32)
        self._device = self._transfers.device_buffer(self._host)
        self._words = self._host.numpy().view(np.uint32)
        self._done = self._transfers.event() if self._transfers.late else None

    def write(self, guides: Sequence[GuideProgress | None]) -> torch.Tensor:
        """Return a row of bits for each guide, and one that allows every token for None.

        They are overwritten by the next call.
        """
        if self._done is not None:
            self._done.synchronize()
        for row, guide in zip(self._words, guides, strict=False):
            if guide is None:
                row.fill(~np.uint32(0))
            else:
                guide.fill(row)
        count = len(guides)
        if self._done is not None:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
            self._done.record(self._transfers.stream())
        return self._device[:count]
