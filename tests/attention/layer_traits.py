"""Layers that ask for more of their attention than a softmax over all before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roseinfer.layer_traits import LayerTraits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 200]
"""One token alone, and sizes about those of blocks and of what kernels look at together."""
KINDS: Mapping[str, Sequence[str]] = {
    "cap": ["cap"],
    "sinks": ["sinks"],
    "slopes": ["slopes"],
    "window and cap": ["window", "cap"],
    "window and sinks": ["window", "sinks"],
    "window and slopes": ["window", "slopes"],
}


def traits_of(
    names: Sequence[str], q_heads: int, head_dim: int, device: str, *, window: int = 17
) -> LayerTraits:
    """Return a layer with these traits. Scores are large enough for a cap to matter."""
    of_heads = torch.arange(q_heads, device=device)
    have: dict[str, Any] = {
        "window": window,
        "cap": 1.5,
        "sinks": of_heads.float().sin() * 2,
        "slopes": 0.5 ** (1 + of_heads.float()),
    }
    return LayerTraits(2 * head_dim**-0.5, **{name: have[name] for name in names})
