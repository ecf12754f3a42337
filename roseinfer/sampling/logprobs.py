"""Logprobs of tokens, and top logprobs, by the model's own logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

_ALIGNED_COLUMNS = 4
"""Columns of float32 in 16 bytes, to which rows are padded.

Torch sums a row that is not aligned in another order, so that its bits would depend on its index in
the batch.
"""
_MAX_LOGPROB_ROWS = 64
"""Prompt tokens whose logprobs are computed at a time."""


class TokenLogprobs(NamedTuple):
    """Logprobs at the position of one token."""

    logprob: float
    """Logprob of the token itself."""
    top_logprobs: list[tuple[int, float]]
    """Top tokens at its position, each with its logprob."""


def rows_without_a_distribution(logits: torch.Tensor) -> torch.Tensor:
    """Return True for rows with NaN or without a finite logit, which have no next token."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of ``[rows, n]`` tokens by the logits, without sampling parameters."""
    scores = logits.float()
    if missing := -scores.shape[-1] % _ALIGNED_COLUMNS:
        scores = pad(scores, (0, missing), value=float("-inf"))
    return scores.log_softmax(-1).gather(-1, tokens)


def prompt_token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logprob of ``tokens[i]`` in row ``rows[i]``, few rows at a time."""
    strips = zip(
        torch.split(rows, _MAX_LOGPROB_ROWS),
        torch.split(tokens[:, None], _MAX_LOGPROB_ROWS),
        strict=True,
    )
    return torch.cat([log_probabilities(logits[each], ids)[:, 0] for each, ids in strips])


def top_token_ids(logits: torch.Tensor, most: int) -> torch.Tensor:
    """Return the ids of the largest logits of each row; ties are ordered by id."""
    bits = (logits.float() + 0.0).view(torch.int32)  # turns -0 into 0, which has other bits
    # As integers these are in the order of the floats.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((ordered << 32) - ids).topk(min(most, len(ids))).indices


def pack_logprobs(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """Return a row of float64 for each chosen token, which ``unpack_logprobs`` reads.

    It has the token's logprob, then the ids of the top ``most`` tokens, then their logprobs.
    """
    tokens = chosen.clamp(min=0)[:, None]
    if not most:
        return log_probabilities(logits, tokens).double()
    top = top_token_ids(logits, most)
    logprobs = log_probabilities(logits, torch.cat([tokens, top], -1)).double()
    return torch.cat([logprobs[:, :1], top.double(), logprobs[:, 1:]], -1)


def unpack_logprobs(row: list[float]) -> TokenLogprobs:
    """Convert a row of ``pack_logprobs``."""
    most = len(row) // 2
    return TokenLogprobs(
        row[0], list(zip(map(int, row[1 : most + 1]), row[most + 1 :], strict=True))
    )
