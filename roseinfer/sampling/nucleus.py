"""Which tokens may be drawn: what temperature, top_k, top_p and min_p make of logits."""

from __future__ import annotations

import torch

_NEVER = float("-inf")
_SMALLEST = torch.finfo(torch.float32).tiny
"""A device may take a smaller temperature for 0. At this one only the likeliest token is drawn."""


def sorted_log_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort log-probabilities, the largest first; those of excluded tokens are -infinity."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # Differences to the largest are divided, since these can only overflow to -infinity.
    largest = ordered[:, :1]
    below = torch.where(ordered == largest, 0.0, ordered - largest).float()
    scaled = below / temperature.clamp(min=_SMALLEST)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = (rank >= top_k) & (top_k > 0)
    scaled = scaled.masked_fill(beyond_k, _NEVER)
    probabilities = scaled.softmax(-1)
    above = probabilities.cumsum(-1) - probabilities
    outside = (above >= top_p) & (top_p < 1)
    outside |= probabilities < min_p * probabilities[:, :1]
    outside[:, 0] = False
    return scaled.masked_fill(outside, _NEVER).log_softmax(-1), order
