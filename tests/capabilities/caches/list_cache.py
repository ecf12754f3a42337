"""The cache of the tutorial: right, with the required methods only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_roseinfer import KVCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec


class ListCache(KVCacheAdapter):
    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.rows: dict[int, list[torch.Tensor]] = {}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        dtype = getattr(torch, self.spec.dtype)
        for i, seq in enumerate(seqs):
            row = torch.stack([key[:, i], value[:, i]]).to(dtype)
            self.rows.setdefault(seq, []).append(row)

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack(self.rows[seq], dim=2)
        return both[0, layer], both[1, layer]
