"""Penalties for tokens that a request has already, by a tally of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.sampling_params import SamplingParams

PROMPTED = 1 << 30
"""A token's tally is how often it was generated, and so much more if the prompt has it."""


def tally_of(token_ids: Sequence[int], prompted: int) -> dict[int, int]:
    """Return the tally of each token of a request whose first ``prompted`` are its prompt."""
    tally = dict.fromkeys(token_ids[:prompted], PROMPTED)
    for token in token_ids[prompted:]:
        tally[token] = tally.get(token, 0) + 1
    return tally


@dataclass(slots=True)
class Penalties:
    """The penalties of some requests as columns on the device, in float64."""

    repetition: torch.Tensor
    """Divides the positive logits of tokens in prompt or text, and multiplies the negative ones."""
    presence: torch.Tensor
    """Taken off the logits of tokens that were generated."""
    frequency: torch.Tensor
    """Taken off them as often as they were generated."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Penalties | None:
        """Build the columns; return None where nobody has a penalty."""
        if not any(each.penalised for each in params):
            return None
        rows = [
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
            for each in params
        ]
        bring = transfers.Transfers(torch.device(device)).bring
        return cls(*bring([*zip(*rows, strict=True)], torch.float64)[:, :, None])

    def apply(self, logits: torch.Tensor, tally: torch.Tensor) -> torch.Tensor:
        """Return penalised logits, in float64: no penalty that is allowed makes one infinite."""
        logits = logits.double()
        lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where(tally != 0, lower, logits)
        generated = tally & (PROMPTED - 1)
        return logits - (generated * self.frequency + (generated > 0) * self.presence)
