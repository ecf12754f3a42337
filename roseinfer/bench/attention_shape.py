"""The shape of one layer's attention, as ``bench attention`` is told it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shape:
    text: str
    sequences: int
    context: int
    """Tokens of each sequence that are attended to, the new one included."""
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """Read ``64x1024:32/8x128``: sequences, context, query heads, KV heads, head size."""
        found = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+)x(\d+)", text)
        numbers = list(map(int, found.groups())) if found else [0]
        if min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{text} is no shape such as 64x1024:32/8x128")
        shape = cls(text, *numbers)
        if shape.q_heads % shape.kv_heads:
            raise argparse.ArgumentTypeError(
                f"{text}: {shape.kv_heads} KV heads are no part of {shape.q_heads} heads"
            )
        return shape

    def cache_bytes(self, dtype: torch.dtype) -> int:
        values = self.sequences * self.context * self.kv_heads * self.head_dim
        return 2 * values * dtype.itemsize
