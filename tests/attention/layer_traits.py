"""Layer traits for tests: windows, softcaps, sinks and ALiBi slopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roseinfer.layer_traits import LayerTraits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WINDOWS = [1, 2, 15, 16, 17, 63, 64, 65, 200]
"""Windows of one token, and of sizes around those of blocks and kernel tiles."""
KINDS: Mapping[str, Sequence[str]] = {
    "softcap": ["softcap"],
    "sinks": ["sinks"],
    "slopes": ["slopes"],
    "window and cap": ["window", "softcap"],
    "window and sinks": ["window", "sinks"],
    "window and slopes": ["window", "slopes"],
}


def traits_of(
    names: Sequence[str], q_heads: int, head_dim: int, device: str, *, window: int = 17
) -> LayerTraits:
    """Return traits of a layer; scores are large enough for a cap to matter."""
    head_indices = torch.arange(q_heads, device=device)
    all_traits: dict[str, Any] = {
        "window": window,
        "softcap": 1.5,
        "sinks": head_indices.float().sin() * 2,
        "slopes": 0.5 ** (1 + head_indices.float()),
    }
    return LayerTraits(2 * head_dim**-0.5, **{name: all_traits[name] for name in names})
