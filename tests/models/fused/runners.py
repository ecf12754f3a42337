"""Fused models prepared for a comparison with transformers' modules."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from roseinfer import AppendPolicy, KVBlockManager
from roseinfer.engine.runner import SequenceRunner

if TYPE_CHECKING:
    from roseinfer.models.causal import CausalModel

TOLERANCE = 2e-4


def fused_runner(family: type[CausalModel], device: str, network: Any) -> SequenceRunner:
    """Run sequences of a fused copy of the network, its cache full of NaN."""
    model = family(deepcopy(network))
    shape = model.shape
    kv = KVBlockManager(
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        4,
        64,
        device,
        torch.float32,
        AppendPolicy(triton=False),
        layers_per_group=shape.num_layers,
    )
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return SequenceRunner(model, kv, attention="triton")


@torch.no_grad()
def transformers_logits(network: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Return transformers' logits after each of the sequences."""
    rows = []
    for tokens in sequences:
        output = network(torch.tensor([tokens], device=network.device), use_cache=False)
        rows.append(output.logits[0, -1])
    return torch.stack(rows)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
