"""Counts the forward passes of which warpgroups compute products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.engine_paths import EnginePath
from roseinfer.kernels.warpgroups.streamed_products import streams

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend


def count_streamed(x: Tensor, weight: Tensor, attention: AttentionBackend, parts: int = 1) -> None:
    """Count a forward pass if warpgroups compute its product by this ``[outputs, inputs]``."""
    if streams(x, weight, parts, 1):
        attention.path_counts[EnginePath.STREAMED] += 1
