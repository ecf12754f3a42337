"""Counts the forward passes of which warpgroups compute products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.engine_paths import EnginePath
from roseinfer.kernels.warpgroups.paired_products import gates_product
from roseinfer.kernels.warpgroups.streamed_products import streams
from roseinfer.models.families.mlps import GatedMlp

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.models.families.mlps import Experts


def count_streamed(x: Tensor, weight: Tensor, attention: AttentionBackend, parts: int = 1) -> None:
    """Count a forward pass if warpgroups compute its product by this ``[outputs, inputs]``."""
    if streams(x, weight, parts, 1):
        attention.path_counts[EnginePath.STREAMED] += 1


def count_paired(x: Tensor, mlp: GatedMlp | Experts, attention: AttentionBackend) -> None:
    """Count a forward pass if pairs of programs compute the products of this MLP."""
    if isinstance(mlp, GatedMlp) and gates_product(x, mlp.gates_and_ups):
        attention.path_counts[EnginePath.PAIRED] += 1
