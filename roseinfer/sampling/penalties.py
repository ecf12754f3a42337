"""Penalties for tokens that a request has already."""

from __future__ import annotations

import torch


def penalise(
    logits: torch.Tensor, seen: torch.Tensor, repetition_penalty: torch.Tensor
) -> torch.Tensor:
    """Apply penalties in float64, where no penalty that is allowed makes a logit infinite."""
    logits = logits.double()
    lower = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    return torch.where(seen, lower, logits)
