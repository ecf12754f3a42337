"""Choosing next tokens on the device, for requests that each have their own parameters.

A choice is the argmax of log-probability plus Gumbel noise, which samples exactly from the
distribution. The noise of a token is a hash of the request's seed, the position and the token, so
a request draws the same whatever it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import SamplingParams

_NEVER = float("-inf")
_SMALLEST = torch.finfo(torch.float32).tiny
"""A device may take a smaller temperature for 0. At this one only the likeliest token is drawn."""


@dataclass(slots=True)
class SamplingBatch:
    """The parameters of some requests as columns on the device, one row each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    seeds: torch.Tensor
    greedy: bool
    """True if every row takes its most likely token: nothing has to be sorted or drawn."""
    penalised: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
    ) -> SamplingBatch:
        """Build the columns. ``seeds[i]`` is request ``i``'s own, or drawn for it."""

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            column([each.temperature for each in params], torch.float32),
            column([each.top_k for each in params], torch.int64),
            column([each.top_p for each in params], torch.float32),
            column([each.min_p for each in params], torch.float32),
            column([each.repetition_penalty for each in params], torch.float64),
            column([signed64(seed) for seed in seeds], torch.int64),
            all(each.temperature == 0 for each in params),
            any(each.repetition_penalty != 1 for each in params),
        )

    def choose(
        self, logits: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the next token for every row of ``[requests, vocab]`` logits.

        ``positions`` are those of the new tokens. ``seen`` marks the tokens that each request
        has already; only repetition penalties need it.
        """
        logits = self._penalise(logits.float(), seen)
        likeliest = logits.argmax(-1)
        if self.greedy:
            return likeliest
        kept, order = self._sorted_log_probabilities(logits)
        noise = gumbel_noise(self.seeds, positions[:, None], order)
        drawn = order.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]
        return torch.where(self.temperature[:, 0] == 0, likeliest, drawn)

    def probabilities(self, logits: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """Return what ``choose`` draws from: exactly zero for a token that cannot be drawn."""
        logits = self._penalise(logits.float(), seen)
        kept, order = self._sorted_log_probabilities(logits)
        drawn = torch.zeros_like(kept).scatter(-1, order, kept.softmax(-1))
        certain = torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.temperature == 0, certain, drawn)

    def _penalise(self, logits: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Apply penalties in float64, where no penalty that is allowed makes a logit infinite."""
        if not self.penalised or seen is None:
            return logits
        logits = logits.double()
        penalty = self.repetition_penalty
        lower = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, lower, logits)

    def _sorted_log_probabilities(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort log-probabilities, the largest first; those of excluded tokens are -infinity."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        # Differences to the largest are divided, since these can only overflow to -infinity.
        largest = ordered[:, :1]
        below = torch.where(ordered == largest, 0.0, ordered - largest).float()
        scaled = below / self.temperature.clamp(min=_SMALLEST)
        rank = torch.arange(scaled.shape[-1], device=scaled.device)
        beyond_k = (rank >= self.top_k) & (self.top_k > 0)
        scaled = scaled.masked_fill(beyond_k, _NEVER)
        probabilities = scaled.softmax(-1)
        above = probabilities.cumsum(-1) - probabilities
        outside = (above >= self.top_p) & (self.top_p < 1)
        outside |= probabilities < self.min_p * probabilities[:, :1]
        outside[:, 0] = False
        return scaled.masked_fill(outside, _NEVER).log_softmax(-1), order


def rows_without_a_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Mark rows that hold NaN, or nothing finite: there is no next token to choose."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens' log-probability by the model's own logits, without any parameter."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


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
