"""Which tokens may be drawn: what temperature, top_k, top_p and min_p make of logits.

A row's outcome must not depend on its neighbours. Devices add the numbers of a row in another
order where there are other numbers of rows, which rounds otherwise. So what is added here are whole
numbers, whose sums are exact; everything else is done to each token by itself.
"""

from __future__ import annotations

import torch

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
