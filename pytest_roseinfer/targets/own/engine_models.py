"""The small models that roseinfer's own engine is checked with, by name.

Transformers takes seconds to import, so that is done when the first model is built.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_roseinfer.targets.own.model_shapes import LONG, config

if TYPE_CHECKING:
    from pytest_roseinfer.engines.twins import Floats


_FELT_SINK = 8.0


def network(name: str, device: str) -> Any:
    """Build a model, always with the same weights, so large that the likeliest token is no tie."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config(name)).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.4 * min(1, 96 / weight.shape[-1]) ** 0.5)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # they begin as biases of 0 and gains of 1
                weight.add_(0.2 * torch.randn(weight.shape))
            if name.endswith("sinks"):  # they weigh next to nothing beside such scores
                weight.add_(_FELT_SINK)
    return model.to(device)


# An engine may make the network that it serves its own, so the slow twin has another one.
@lru_cache(maxsize=16)
def _untouched(name: str, device: str) -> Any:
    model = network(name, device)
    model.set_attn_implementation("eager")  # torch's own attention leaves caps out
    return model


@lru_cache(maxsize=1 << 15)
def logits(name: str, device: str, tokens: tuple[int, ...]) -> Floats:
    """Compute the logits of the token after these from all of them anew, without a cache."""
    # A GPU that processes share keeps each of them waiting: small models do without it.
    device = device if name in LONG else "cpu"
    found = _untouched(name, device)(torch.tensor([tokens], device=device), use_cache=False)
    return np.asarray(found.logits[0, -1].double().cpu())
