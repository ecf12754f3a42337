"""The MLPs of Llama's family: one for all tokens, or a few of many experts for each."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.kernels.experts.choice import choose_experts
from roseinfer.kernels.experts.visiting import visit_gated, visit_weighed
from roseinfer.kernels.experts.visits import visits_of
from roseinfer.kernels.products.streamed import stream_linear_in_parts
from roseinfer.models.families.linear_layers import Product, gated
from roseinfer.models.joined import join_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    Noted = list[tuple[Tensor, Tensor]]
    """The experts of rows and how much each counts, layer by layer."""

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
