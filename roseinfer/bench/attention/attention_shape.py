"""The shape of one layer's attention, as ``bench attention`` is told it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SPREAD_BYTES = 1 << 30
"""Caches of that many bytes take turns, so that none is still in a GPU's L2 cache."""
_MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    text: str
    sequences: int
    stored: int
    """Tokens of each sequence that are stored before, and attended to."""
    new: int
    """Tokens of each sequence that attend, to themselves and to all before them."""
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Read ``64x1024:32/8x128``, a step's, or ``8x0+2048:32/8x128``, one of prompts.

        These are sequences, context, query heads, KV heads and head size. A context with a plus is
        of stored tokens and new ones; without, the last of its tokens is new.
        """
        found = re.fullmatch(r"(\d+)x(?:(\d+)\+)?(\d+):(\d+)/(\d+)x(\d+)", text)
        sequences, stored, last, *heads = map(int, found.groups("-1")) if found else [0] * 6
        if min(sequences, last, *heads) < 1:
            raise argparse.ArgumentTypeError(
                f"{text} is no shape such as 64x1024:32/8x128 or 8x0+2048:32/8x128"
            )
        stored, new = (last - 1, 1) if stored < 0 else (stored, last)
        shape = cls(text, sequences, stored, new, *heads)
        if shape.q_heads % shape.kv_heads:
            raise argparse.ArgumentTypeError(
                f"{text}: {shape.kv_heads} KV heads are no part of {shape.q_heads} heads"
            )
        return shape

    @property
    def context(self) -> int:
        """The tokens of each sequence, the new ones included."""
        return self.stored + self.new

    def cache_bytes(self, dtype: torch.dtype) -> int:
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * dtype.itemsize

    def layers(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many layers' caches take turns."""
        count = -(-_SPREAD_BYTES // self.cache_bytes(dtype)) if device.type == "cuda" else 1
        return max(2, min(_MOST_LAYERS, count))
