"""Leaving out tokens that a grammar or the like does not allow next."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_BITS = 32


def only_allowed(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return logits that are -infinity but for allowed tokens.

    ``allowed`` is int32, ``[rows, words]``, as xgrammar and llguidance make it: bit ``t % 32`` of
    word ``t // 32`` is set if token ``t`` is allowed. Tokens behind the last word are not.
    """
    bits = (allowed[:, :, None] >> torch.arange(_BITS, device=allowed.device)) & 1
    mask = bits.flatten(1)[:, : logits.shape[-1]].bool()
    return logits.masked_fill(~pad(mask, (0, logits.shape[-1] - mask.shape[-1])), float("-inf"))
