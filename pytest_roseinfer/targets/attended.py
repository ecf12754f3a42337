"""What attention is handed of each sequence: a second route by which a cache is read back."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
Attended = defaultdict[int, list[KeysAndValues]]
"""The keys and values of each layer, ``[tokens, heads, head_dim]``, by sequence."""


def nothing_attended(spec: CacheSpec) -> Attended:
    shape, dtype = (0, spec.num_heads, spec.head_dim), getattr(torch, spec.dtype)
    nothing = torch.empty(shape, dtype=dtype, device=spec.device)
    return defaultdict(lambda: [(nothing, nothing)] * spec.num_layers)


def behind(before: KeysAndValues, unseen: int, seen: Iterable[torch.Tensor]) -> KeysAndValues:
    """Put the tokens that attention sees behind the ``unseen`` first ones.

    A sliding window hides those; they stay as they were when attention still saw them.
    """
    keys, values = (torch.cat([old[:unseen], new]) for old, new in zip(before, seen, strict=True))
    return keys, values
