"""torch.compile for models that run on transformers' own modules."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from roseinfer.errors import ConfigError
from roseinfer.models.causal import ATTENTION, attend


def compile_layers(model: Any) -> None:
    """Fuse what lies between the matrix products of a layer and its attention.

    Layers are compiled one by one, for any number of tokens, and share the code: the work is that
    of one layer. Our attention is left out.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"compile_layers: transformers does not say which of {type(model).__name__}'s modules "
            "are its layers: leave it off"
        )
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True)
