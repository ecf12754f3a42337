"""What is told of tokens: how likely they were by the model's own logits, and what was likelier."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

_ALIGNED_COLUMNS = 4
"""Columns of float32 in 16 bytes. Torch sums a row that begins elsewhere in another order, so that
its bits would depend on its place in the batch."""
_STRIP = 64
"""Log-probabilities of a prompt are computed for so many tokens at a time."""


class Told(NamedTuple):
    """What is told of one token."""

    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens at its place, each with its log-probability."""


def rows_without_a_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Mark rows that hold NaN, or nothing finite: there is no next token to choose."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return how likely the ``[rows, n]`` tokens are by the model's logits, without parameters."""
    scores = logits.float()
    if missing := -scores.shape[-1] % _ALIGNED_COLUMNS:
        scores = pad(scores, (0, missing), value=float("-inf"))
    return scores.log_softmax(-1).gather(-1, tokens)


def of_a_prompt(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of a token in each of these rows, few rows at a time."""
    strips = zip(torch.split(rows, _STRIP), torch.split(tokens[:, None], _STRIP), strict=True)
    return torch.cat([log_probabilities(logits[own], those)[:, 0] for own, those in strips])


def likeliest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """Return the ids of the largest logits of each row; of equal ones, the lowest ids first."""
    bits = (logits.float() + 0.0).view(torch.int32)  # 0 and -0 are equal, and have other bits
    # As whole numbers these are in the order of the floats.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((ordered << 32) - ids).topk(min(most, len(ids))).indices


def tell(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """Return a row of float64 for each chosen token, which ``told_of`` reads.

    It has the token's log-probability, then the ids of ``most`` likeliest, and then theirs.
    """
    tokens = chosen.clamp(min=0)[:, None]
    if not most:
        return log_probabilities(logits, tokens).double()
    top = likeliest(logits, most)
    told = log_probabilities(logits, torch.cat([tokens, top], -1)).double()
    return torch.cat([told[:, :1], top.double(), told[:, 1:]], -1)


def told_of(row: list[float]) -> Told:
    """Read a row that ``tell`` made."""
    most = len(row) // 2
    return Told(row[0], list(zip(map(int, row[1 : most + 1]), row[most + 1 :], strict=True)))
