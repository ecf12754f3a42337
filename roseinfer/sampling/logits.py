"""Processing of logits: temperature, top-k, top-p, min-p, penalties, bitmasks and noise.

A row's result must not depend on other rows (batch invariance). Devices sum a row in an order that
depends on the number of rows, and another order rounds differently. So all sums here are of whole
numbers, which are exact; everything else is elementwise.
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

    from roseinfer.guided.compiler import GuideMatcher
    from roseinfer.sampling_params import SamplingParams

_NEG_INF = float("-inf")
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Smallest temperature: a device may flush smaller ones to 0. It always samples the argmax."""
_FIXED_POINT_ONE = 1 << 42
"""Weight of the top token, as a whole number of 42 bits.

Two million such weights fit into 64 bits, and the truncation error of a million smaller ones is
small compared with float32's rounding.
"""


def sorted_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled logits in descending order, and the token ids in that order.

    Logits are divided by the temperature and shifted so that the largest is 0. Those of tokens
    that top_k, top_p or min_p exclude are -infinity.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # Differences to the largest are divided: they can only overflow to -infinity.
    below = torch.where(ordered == ordered[:, :1], 0.0, _differences(ordered))
    scaled = below / temperature.clamp(min=_MIN_TEMPERATURE)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = (rank >= top_k) & (top_k > 0)
    scaled = scaled.masked_fill_(beyond_k, _NEG_INF)
    weights = scaled.exp()
    whole = (weights * _FIXED_POINT_ONE).to(torch.int64)
    sums = whole.cumsum(-1)
    above = sums - whole
    outside = (above >= sums[:, -1:].double() * top_p.double()) & (top_p < 1)
    outside |= weights < min_p
    outside[:, 0] = False
    return scaled.masked_fill_(outside, _NEG_INF), order


def _differences(ordered: torch.Tensor) -> torch.Tensor:
    """Return the difference of each logit to the first of its row, in float32.

    Penalties convert all rows of a step to float64. Rows without penalties get the same result in
    either dtype.
    """
    if ordered.dtype is torch.float32:
        return ordered - ordered[:, :1]
    rounded = ordered.float()
    exact = (rounded == ordered) & (rounded[:, :1] == ordered[:, :1])
    return torch.where(exact, rounded - rounded[:, :1], (ordered - ordered[:, :1]).float())


# Penalties for tokens in prompt and completion, by counts of them.


IN_PROMPT = 1 << 30
"""Summand of a token's count if the prompt has it; the rest is how often it was generated."""


def count_prompt_and_output(token_ids: Sequence[int], num_prompt_tokens: int) -> dict[int, int]:
    """Count the tokens of a request, adding ``IN_PROMPT`` to those that its prompt has."""
    row_token_counts = dict.fromkeys(token_ids[:num_prompt_tokens], IN_PROMPT)
    for token in token_ids[num_prompt_tokens:]:
        row_token_counts[token] = row_token_counts.get(token, 0) + 1
    return row_token_counts


@dataclass(slots=True)
class Penalties:
    """Penalties of requests as columns on the device, in float64."""

    repetition: torch.Tensor
    """Divisor of positive logits, factor of negative ones, of tokens in prompt or completion."""
    presence: torch.Tensor
    """Number subtracted once from the logit of every token already generated."""
    frequency: torch.Tensor
    """Number subtracted for each time that the token was generated."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Penalties | None:
        """Build the columns; return None where no request has a penalty."""
        if not any(each.has_penalties for each in params):
            return None
        rows = [
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
            for each in params
        ]
        upload_columns = transfers.Transfers(torch.device(device)).upload_columns
        return cls(*upload_columns([*zip(*rows, strict=True)], torch.float64)[:, :, None])

    def apply(self, logits: torch.Tensor, row_token_counts: torch.Tensor) -> torch.Tensor:
        """Return penalized logits, in float64, in which no valid penalty overflows."""
        logits = logits.double()
        lower = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where(row_token_counts != 0, lower, logits)
        generated = row_token_counts & (IN_PROMPT - 1)
        return logits - (generated * self.frequency + (generated > 0) * self.presence)


# Bitmasks of the tokens that guides allow next.


_WORD_BITS = 32
ALL_TOKENS_ALLOWED = -1
"""Bitmask word that allows all of its tokens."""


def bitmask_words(vocabulary: int) -> int:
    """Return the number of bitmask words for a vocabulary."""
    return -(-vocabulary // _WORD_BITS)


def apply_token_bitmask(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return logits with -infinity for all tokens that are not allowed.

    ``allowed`` is int32, ``[rows, words]``, as xgrammar and llguidance make it: bit ``t % 32`` of
    word ``t // 32`` is set if token ``t`` is allowed. Tokens after the last word are not.
    """
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=allowed.device)
    bits = (allowed[:, :, None] >> shifts) & 1
    mask = bits.flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~pad(mask, (0, logits.shape[-1] - mask.shape[-1])), float("-inf"))


class TokenBitmaskBuffer:
    """Buffer through which the bitmasks of guides are computed and uploaded."""

    def __init__(self, most: int, vocabulary: int, device: torch.device) -> None:
        """Allocate a buffer of ``most`` rows, the most that one ``write`` takes."""
        self._transfers = transfers.Transfers(device)
        self._host = self._transfers.host_buffer((most, bitmask_words(vocabulary)), torch.int32)
        self._device = self._transfers.device_buffer(self._host)
        self._words = self._host.numpy().view(np.uint32)
        self._done = self._transfers.event() if self._transfers.is_async else None

    def write(self, guides: Sequence[GuideMatcher | None]) -> torch.Tensor:
        """Return the bitmask of each guide on the device; all tokens are allowed for None.

        The next call overwrites the result.
        """
        if self._done is not None:
            self._done.synchronize()
        for row, guide in zip(self._words, guides, strict=False):
            if guide is None:
                row.fill(~np.uint32(0))
            else:
                guide.fill_bitmask(row)
        count = len(guides)
        if self._done is not None:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
            self._done.record(self._transfers.stream())
        return self._device[:count]


# Gumbel noise, a function of seed, position and token alone.


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise, a function of seed, position and token alone."""
    bits = _mix(_mix(_mix(seeds) + positions) + tokens)
    # With one more bit, the largest would round to 1, and its noise would be infinite.
    uniform = (((bits >> 41) & 0x7FFFFF).to(torch.float32) + 0.5) / (1 << 23)
    return -(-uniform.log()).log()


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Hash 64-bit integers one to one (the splitmix64 mixer)."""
    bits = bits + signed64(0x9E3779B97F4A7C15)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * signed64(0xBF58476D1CE4E5B9)
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * signed64(0x94D049BB133111EB)
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def signed64(number: int) -> int:
    """Return the same 64 bits as a signed integer, the only kind that torch has."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
