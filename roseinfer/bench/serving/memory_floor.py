"""The least time that decoding can take: every byte it needs read once, at full bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from roseinfer.bench.timing import copy_bandwidth

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.llm import LLM

_COPY_BYTES_ON_GPU = 1 << 28
"""No more than a KV cache that takes what it can leaves free."""


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    weight_bytes: int
    """Read in every step at least, whatever the batch."""
    token_bytes: int
    """The key and the value of one token in all layers."""
    bandwidth: float

    def seconds(self, passes: int, stored_tokens: int) -> float:
        """Return the least time of forward passes that together attend to ``stored_tokens``."""
        return (passes * self.weight_bytes + stored_tokens * self.token_bytes) / self.bandwidth

    def facts(self) -> dict[str, float]:
        return {
            "copy_bandwidth_gb_per_s": self.bandwidth / 1e9,
            "weights_mb_per_step": self.weight_bytes / 1e6,
            "kv_bytes_per_token": self.token_bytes,
        }


def memory_floor(skeleton: Any, llm: LLM) -> MemoryFloor:
    """Measure the floor; ``skeleton`` is the network before an engine rearranged anything."""
    model = llm.engine.sessions.model
    values = 2 * model.shape.num_layers * model.shape.num_kv_heads * model.shape.head_dim
    return MemoryFloor(
        values_read(skeleton) * model.dtype.itemsize,
        values * model.dtype.itemsize,
        copy_bandwidth(model.device, _COPY_BYTES_ON_GPU),
    )


def values_read(network: Any) -> int:
    """Count the weights that a decode step reads at least.

    Those are all but tables of which it takes single rows, and experts that one row does not visit.
    """
    head = network.get_output_embeddings().weight
    tables = {
        id(module.weight)
        for module in network.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head
    }
    read: int = sum(weight.numel() for weight in network.parameters() if id(weight) not in tables)
    return read - sum(map(_values_of_idle_experts, network.modules()))


def _values_of_idle_experts(module: Any) -> int:
    visited: int | None = getattr(getattr(module, "gate", None), "top_k", None)
    if visited is None or not hasattr(module, "experts"):
        return 0
    weights: list[Tensor] = [*module.experts.parameters()]
    return sum((len(each) - visited) * (each.numel() // len(each)) for each in weights)
