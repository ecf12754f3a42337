"""Names that ``pytest_roseinfer`` needs besides the public ones; users should not import them.

As in ``roseinfer`` itself, a name is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.attention.reference import paged_attention_reference as paged_attention_reference
    from roseinfer.attention.triton import load_attention_kernels as load_attention_kernels
    from roseinfer.errors import did_you_mean as did_you_mean
    from roseinfer.garbage import gc_disabled as gc_disabled
    from roseinfer.layer_traits import LayerTraits as LayerTraits
    from roseinfer.sampling import SamplingBatch as SamplingBatch
    from roseinfer.terminal import interrupts_kill as interrupts_kill

_HOMES = {
    "LayerTraits": "roseinfer.layer_traits",
    "SamplingBatch": "roseinfer.sampling",
    "did_you_mean": "roseinfer.errors",
    "gc_disabled": "roseinfer.garbage",
    "interrupts_kill": "roseinfer.terminal",
    "load_attention_kernels": "roseinfer.attention.triton",
    "paged_attention_reference": "roseinfer.attention.reference",
}
"""Module of each name."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roseinfer._plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
