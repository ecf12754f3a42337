"""Keys and values that attention gets of each sequence: a second way to read a cache back."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
AttentionContext = defaultdict[int, list[KeysAndValues]]
"""Keys and values of each layer, ``[tokens, heads, head_dim]``, by sequence."""


def empty_context(spec: CacheSpec) -> AttentionContext:
    shape, dtype = (0, spec.num_heads, spec.head_dim), getattr(torch, spec.dtype)
    nothing = torch.empty(shape, dtype=dtype, device=spec.device)
    return defaultdict(lambda: [(nothing, nothing)] * spec.num_layers)


def prepend_unseen(
    before: KeysAndValues, unseen: int, visible: Iterable[torch.Tensor]
) -> KeysAndValues:
    """Prepend the ``unseen`` first tokens to those that attention sees.

    A sliding window hides the first ones; they stay as they were when attention last saw them.
    """
    keys, values = (
        torch.cat([old[:unseen], new]) for old, new in zip(before, visible, strict=True)
    )
    return keys, values
