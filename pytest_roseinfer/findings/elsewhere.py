"""Where a token lies that is not where it must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.findings.observation import Pair


def elsewhere(arena: Pair, layer: int, kind: str, head: int, missing: torch.Tensor) -> str:
    """Say which slot of a layer holds what is missing; nothing if none does."""
    held = arena["KV".index(kind)][layer]
    places = (as_bits(held) == as_bits(missing.contiguous())).all(-1).nonzero().tolist()
    for block, other, slot in places:
        of_head = f", head {other}" if other != head else ""
        return f"; the right one lies in block {block}, position {slot}{of_head}"
    return ""
