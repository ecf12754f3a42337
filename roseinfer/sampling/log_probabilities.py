"""What is told of a step's tokens: how likely they were by the model's own logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rows_without_a_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Mark rows that hold NaN, or nothing finite: there is no next token to choose."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens' log-probability by the model's own logits, without any parameter."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
