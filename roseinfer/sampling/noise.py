"""Gumbel noise that is a function of seed, position and token, and of nothing else."""

from __future__ import annotations

import torch


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
