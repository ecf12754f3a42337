"""Which tokens may be drawn: what temperature, top_k, top_p and min_p make of logits.

A row's outcome must not depend on its neighbours. Devices add the numbers of a row in another
order where there are other numbers of rows, which rounds otherwise. So what is added here are whole
numbers, whose sums are exact; everything else is done to each token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import pad

from roseinfer.kv import transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.guided.compiler import GuideProgress
    from roseinfer.sampling_params import SamplingParams

_NEVER = float("-inf")
_SMALLEST = torch.finfo(torch.float32).tiny
"""A device may take a smaller temperature for 0. At this one only the likeliest token is drawn."""
_ONE = 1 << 42
"""The likeliest token's weight, as a whole number. So two million of them fit into 64 bits, and
what a million others lose by being cut off behind 42 bits is little beside float32's rounding."""


def sorted_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort by probability, the largest first, and return the order too.

    Logits are divided by the temperature, and the largest is 0. Those of excluded tokens are
    -infinity.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # Differences to the largest are divided, since these can only overflow to -infinity.
    below = torch.where(ordered == ordered[:, :1], 0.0, _differences(ordered))
    scaled = below / temperature.clamp(min=_SMALLEST)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = (rank >= top_k) & (top_k > 0)
    scaled = scaled.masked_fill_(beyond_k, _NEVER)
    weights = scaled.exp()
    whole = (weights * _ONE).to(torch.int64)
    sums = whole.cumsum(-1)
    above = sums - whole
    outside = (above >= sums[:, -1:].double() * top_p.double()) & (top_p < 1)
    outside |= weights < min_p
    outside[:, 0] = False
    return scaled.masked_fill_(outside, _NEVER), order


def _differences(ordered: torch.Tensor) -> torch.Tensor:
    """Return how far each logit is from the first of its row, in float32.

    Penalties make float64 of all rows of a step. Rows without one get the same there.
    """
    if ordered.dtype is torch.float32:
        return ordered - ordered[:, :1]
    rounded = ordered.float()
    exact = (rounded == ordered) & (rounded[:, :1] == ordered[:, :1])
    return torch.where(exact, rounded - rounded[:, :1], (ordered - ordered[:, :1]).float())


# Penalties for tokens that a request has already, by a tally of them.


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


# Leaving out tokens that a grammar or the like does not allow next.


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


# Gumbel noise that is a function of seed, position and token, and of nothing else.


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise, a function of seed, position and token alone."""
    bits = _mix(_mix(_mix(seeds) + positions) + tokens)
    # With one bit more, the largest would be rounded to 1, and its noise be infinite.
    uniform = (((bits >> 41) & 0x7FFFFF).to(torch.float32) + 0.5) / (1 << 23)
    return -(-uniform.log()).log()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Scramble 64-bit integers, one to one, so that none shows which was the next larger."""
    bits = bits + signed64(0x9E3779B97F4A7C15)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * signed64(0xBF58476D1CE4E5B9)
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * signed64(0x94D049BB133111EB)
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def signed64(number: int) -> int:
    """Return the same 64 bits as a signed integer, which torch's are."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
