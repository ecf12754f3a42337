"""Weights large enough for sharp attention and a clear argmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SEED = 1


@torch.no_grad()
def enlarge(model: Any) -> None:
    """Replace all weights by random ones; initial weights make all tokens about equally likely."""
    generator = torch.Generator().manual_seed(_SEED)
    head = model.get_output_embeddings()
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() < 2:
            # Sinks need weight next to scores that differ much. Some initial weights are not
            # finite.
            size = 3.0 if name.endswith("sinks") else 0.1
            weight.copy_(size * noise + weight.nan_to_num(0, 0, 0))
        elif isinstance(module, nn.Embedding) and module is not head:
            weight.copy_(noise)
        else:
            weight.copy_(noise * (4.0 if module is head else 1.5) / _inputs(weight, module) ** 0.5)


def _inputs(weight: torch.Tensor, module: nn.Module) -> int:
    """Return the number of inputs of a matrix, or of one in a stack."""
    if weight.dim() == 2 and not isinstance(module, nn.Linear):
        return weight.shape[0]  # GPT-2 and others store the transpose
    return weight.shape[-1] if weight.dim() == 2 else min(weight.shape[1:])
