"""GEMMs of few and of many rows, by the kernels of Llama's family and by torch."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear as torch_linear

from roseinfer.kernels.cuda.paired import (
    add_paired_gemm,
    can_add_paired_gemm,
    can_pair_gate_up,
    paired_gate_up,
)
from roseinfer.kernels.cuda.streamed import can_stream_gemm
from roseinfer.kernels.triton.experts import expert_down, expert_gate_up, route_rows, select_experts
from roseinfer.kernels.triton.linear import split_k_matmul
from roseinfer.kernels.triton.streamed import (
    num_k_splits,
    silu_and_mul,
    splits_evenly,
    stream_gate_up,
    stream_linear,
    stream_linear_split_k,
)
from roseinfer.models.llama_weights import join_gate_up
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend

MAX_ROWS = 64
"""Largest number of rows for our GEMMs.

With more rows, they read weights once per tile of rows, and torch's read them once.
"""
_MAX_SPLIT_K_ROWS = 512
"""Largest number of rows for split-K.

With more rows, an unsplit GEMM fills a GPU, and is rounded differently.
"""


def dispatch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``."""
    few = x.shape[0] <= MAX_ROWS
    return stream_linear(x, weight, bias) if few else torch_linear(x, weight, bias)


def split_k_gemm(x: Tensor, weight: Tensor, *, always: bool) -> Tensor:
    """Compute a GEMM as ``[parts, rows, outputs]``, still to be added up.

    The parts are those of few rows ``always``, or else where that is faster than an unsplit GEMM.
    """
    if x.shape[0] > MAX_ROWS:
        if not always and x.shape[0] > _MAX_SPLIT_K_ROWS:
            return (x @ weight.T)[None]
        if splits_evenly(*weight.shape):
            return split_k_matmul(x, weight.T, num_k_splits(*weight.shape))
        if not always:
            return (x @ weight.T)[None]
    return stream_linear_split_k(x, weight)


@dataclass(frozen=True, slots=True)
class ResidualGemm:
    """A GEMM whose result is added to the residual stream."""

    x: Tensor
    weight: Tensor

    def split_k(self, *, always: bool) -> Tensor:
        """Compute it by ``split_k_gemm``."""
        return split_k_gemm(self.x, self.weight, always=always)

    def add_paired(self, residual: Tensor, times: float) -> bool:
        """Add it to ``residual`` if that is faster than adding later.

        ``times`` multiplies the sum of its parts. Return True if it was added. The bits are the
        same.
        """
        if self.x.shape[0] <= MAX_ROWS or not splits_evenly(*self.weight.shape):
            return False
        parts = num_k_splits(*self.weight.shape)
        if not can_add_paired_gemm(residual, self.x, self.weight, parts):
            return False
        add_paired_gemm(residual, self.x, self.weight, parts, times)
        return True


def gate_up(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """Compute the first half of a gated MLP."""
    if x.shape[0] <= MAX_ROWS:
        return stream_gate_up(x, gate_up_weight)
    if can_pair_gate_up(x, gate_up_weight):
        return paired_gate_up(x, gate_up_weight)
    return silu_and_mul(x @ gate_up_weight.T)


if TYPE_CHECKING:
    RecordedRouting = list[tuple[Tensor, Tensor]]
    """Experts of rows and their weights, layer by layer."""


# The MLPs of Llama's family: one for all tokens, or a mixture of experts.


_RECORDED_ROUTING: ContextVar[RecordedRouting | None] = ContextVar("noted_experts", default=None)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A gated MLP: GEMMs of gates and of gated values, and one of the results."""

    gate_up_weight: Tensor
    down: Tensor

    @classmethod
    def from_module(cls, module: Any) -> GatedMlp:
        """Join the weights that are multiplied by the same rows."""
        return cls(join_gate_up(module), module.down_proj.weight)

    def residual_update(self, x: Tensor) -> ResidualGemm:
        """Compute all but the last GEMM, whose result is added to each row."""
        return ResidualGemm(gate_up(x, self.gate_up_weight), self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: gated MLPs; each row is routed to a few of them."""

    router: Tensor
    gate_up_weight: Tensor
    """Weights of gates, then of gated values: ``[experts, 2 * inner, width]``."""
    down: Tensor
    top_k: int
    """Experts per row."""
    renormalize: bool
    """True if the weights of a row's experts add up to one."""
    weights_in_row_dtype: bool
    """True if expert weights have the rows' dtype; they are float32 otherwise."""

    @classmethod
    def from_module(cls, module: Any) -> Experts:
        router, experts = module.gate, module.experts
        always_shared = not hasattr(router, "norm_topk_prob")  # Mixtral's, which rounds no weight
        return cls(
            router.weight, experts.gate_up_proj, experts.down_proj, router.top_k,
            renormalize=always_shared or router.norm_topk_prob,
            weights_in_row_dtype=not always_shared,
        )  # fmt: skip

    def residual_update(self, x: Tensor) -> Tensor:
        """Compute the update of each row as ``[parts, rows, width]``: a part per expert of the row.

        Its bits never depend on other rows.
        """
        logits = stream_linear_split_k(x, self.router)
        dtype = x.dtype if self.weights_in_row_dtype else torch.float32
        experts, weights = select_experts(
            logits, x, self.top_k, dtype, renormalize=self.renormalize
        )
        if (noted := _RECORDED_ROUTING.get()) is not None:
            noted.append((experts, weights))
        routing = route_rows(experts, len(self.router))
        return expert_down(
            expert_gate_up(x, self.gate_up_weight, routing), self.down, weights, routing
        )


@contextmanager
def record_routing() -> Iterator[RecordedRouting]:
    """Record the routing of rows to experts inside the context."""
    noted: RecordedRouting = []
    before = _RECORDED_ROUTING.set(noted)
    try:
        yield noted
    finally:
        _RECORDED_ROUTING.reset(before)


def build_mlp(module: Any) -> GatedMlp | Experts:
    return (
        Experts.from_module(module) if hasattr(module, "experts") else GatedMlp.from_module(module)
    )


# Counters of forward passes by the kernels of their GEMMs.


def count_streaming_gemm(
    x: Tensor, weight: Tensor, attention: AttentionBackend, parts: int = 1
) -> None:
    """Count a forward pass if the streaming GEMM multiplies by this ``[outputs, inputs]``."""
    if can_stream_gemm(x, weight, parts, 1):
        attention.path_counts[EnginePath.STREAMING_GEMM] += 1


def count_paired_gemm(x: Tensor, mlp: GatedMlp | Experts, attention: AttentionBackend) -> None:
    """Count a forward pass if the paired GEMM computes this MLP."""
    if isinstance(mlp, GatedMlp) and can_pair_gate_up(x, mlp.gate_up_weight):
        attention.path_counts[EnginePath.PAIRED_GEMM] += 1
