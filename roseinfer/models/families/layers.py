"""Products of few rows and of many, which the kernels of Llama's family and torch compute."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear as torch_linear

from roseinfer.kernels.cuda.paired import add_product, adds_product, gate_product, gates_product
from roseinfer.kernels.cuda.streamed import streams
from roseinfer.kernels.triton.experts import choose_experts, visit_gated, visit_weighed, visits_of
from roseinfer.kernels.triton.linear import multiply_in_parts
from roseinfer.kernels.triton.streamed import (
    cut_evenly,
    linear_gated,
    multiply_gated,
    num_parts,
    stream_linear,
    stream_linear_in_parts,
)
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend

MOST_ROWS = 64
"""With more, our products read their weights once for each tile of rows, and torch's once."""
_MOST_ROWS_IN_PARTS = 512
"""With more, a whole product has enough to do for all of a GPU, and is rounded in another way."""


def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``."""
    few = len(x) <= MOST_ROWS
    return stream_linear(x, weight, bias) if few else torch_linear(x, weight, bias)


def in_parts(x: Tensor, weight: Tensor, *, always: bool) -> Tensor:
    """Compute a product as ``[parts, rows, outputs]``, still to be added up.

    The parts are those of few rows ``always``, or where that is faster than a whole product.
    """
    if len(x) > MOST_ROWS:
        if not always and len(x) > _MOST_ROWS_IN_PARTS:
            return (x @ weight.T)[None]
        if cut_evenly(*weight.shape):
            return multiply_in_parts(x, weight.T, num_parts(*weight.shape))
        if not always:
            return (x @ weight.T)[None]
    return stream_linear_in_parts(x, weight)


@dataclass(frozen=True, slots=True)
class Product:
    """A product that is to be added to the residual stream."""

    x: Tensor
    weight: Tensor

    def parts(self, *, always: bool) -> Tensor:
        """Compute it ``in_parts``."""
        return in_parts(self.x, self.weight, always=always)

    def added_in_pairs(self, residual: Tensor, times: float) -> bool:
        """Add it, ``times`` all of its parts, where that is faster than adding them up behind.

        The bits are the same.
        """
        if len(self.x) <= MOST_ROWS or not cut_evenly(*self.weight.shape):
            return False
        parts = num_parts(*self.weight.shape)
        if not adds_product(residual, self.x, self.weight, parts):
            return False
        add_product(residual, self.x, self.weight, parts, times)
        return True


def gated(x: Tensor, gates_and_ups: Tensor) -> Tensor:
    """Compute the first half of a gated MLP."""
    if len(x) <= MOST_ROWS:
        return linear_gated(x, gates_and_ups)
    if gates_product(x, gates_and_ups):
        return gate_product(x, gates_and_ups)
    return multiply_gated(x @ gates_and_ups.T)


# Linear layers whose weights lie in one tensor, so that one product computes all of them.


def join_weights(layers: Sequence[torch.nn.Linear]) -> Tensor:
    """Put the weights into one ``[outputs, inputs]``, one after the other.

    The layers keep views of it, so that nothing is stored twice.
    """
    joined = torch.cat([layer.weight.detach() for layer in layers])
    begin = 0
    for layer in layers:
        layer.weight.data = joined[begin : begin + layer.out_features]
        begin += layer.out_features
    return joined


def join_biases(layers: Sequence[torch.nn.Linear]) -> Tensor | None:
    """Return the biases of the layers one after the other, or None where none has any."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            layer.weight.new_zeros(layer.out_features)
            if layer.bias is None
            else layer.bias.detach()
            for layer in layers
        ]
    )


if TYPE_CHECKING:
    Noted = list[tuple[Tensor, Tensor]]


if TYPE_CHECKING:
    "The experts of rows and how much each counts, layer by layer."


# The MLPs of Llama's family: one for all tokens, or a few of many experts for each.


_NOTED: ContextVar[Noted | None] = ContextVar("noted_experts", default=None)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Two products of a row, one of which gates the other, and one of what comes out."""

    gates_and_ups: Tensor
    down: Tensor

    @classmethod
    def of(cls, module: Any) -> GatedMlp:
        """Join the weights that are multiplied by the same rows."""
        if hasattr(module, "gate_up_proj"):
            gates_and_ups = module.gate_up_proj.weight
        else:
            gates_and_ups = join_weights((module.gate_proj, module.up_proj))
        return cls(gates_and_ups, module.down_proj.weight)

    def added(self, x: Tensor) -> Product:
        """Compute all but the last product, which is what is added to each row."""
        return Product(gated(x, self.gates_and_ups), self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """Many gated MLPs, of which each row visits a few."""

    router: Tensor
    gates_and_ups: Tensor
    """``[experts, 2 * inner, width]``."""
    down: Tensor
    most: int
    """How many a row visits."""
    shared: bool
    """The weights of a row's experts add up to one."""
    rounded: bool
    """Weights have the dtype of rows, and float32 otherwise."""

    @classmethod
    def of(cls, module: Any) -> Experts:
        router, experts = module.gate, module.experts
        always_shared = not hasattr(router, "norm_topk_prob")  # Mixtral's, which rounds no weight
        return cls(
            router.weight, experts.gate_up_proj, experts.down_proj, router.top_k,
            shared=always_shared or router.norm_topk_prob, rounded=not always_shared,
        )  # fmt: skip

    def added(self, x: Tensor) -> Tensor:
        """Compute what is added to each row as ``[parts, rows, width]``: a part for each expert.

        No other row has a say in its bits in any case.
        """
        logits = stream_linear_in_parts(x, self.router)
        dtype = x.dtype if self.rounded else torch.float32
        experts, weights = choose_experts(logits, x, self.most, dtype, shared=self.shared)
        if (noted := _NOTED.get()) is not None:
            noted.append((experts, weights))
        visits = visits_of(experts, len(self.router))
        return visit_weighed(visit_gated(x, self.gates_and_ups, visits), self.down, weights, visits)


@contextmanager
def noting_experts() -> Iterator[Noted]:
    """Collect the experts that rows visit meanwhile."""
    noted: Noted = []
    before = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(before)


def mlp_of(module: Any) -> GatedMlp | Experts:
    return Experts.of(module) if hasattr(module, "experts") else GatedMlp.of(module)


# Counts the forward passes of which warpgroups compute products.


def count_streamed(x: Tensor, weight: Tensor, attention: AttentionBackend, parts: int = 1) -> None:
    """Count a forward pass if warpgroups compute its product by this ``[outputs, inputs]``."""
    if streams(x, weight, parts, 1):
        attention.path_counts[EnginePath.STREAMED] += 1


def count_paired(x: Tensor, mlp: GatedMlp | Experts, attention: AttentionBackend) -> None:
    """Count a forward pass if pairs of programs compute the products of this MLP."""
    if isinstance(mlp, GatedMlp) and gates_product(x, mlp.gates_and_ups):
        attention.path_counts[EnginePath.PAIRED] += 1
