"""A paged cache with a fast path, a slow path and a ledger. It is right."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import torch

from pytest_roseinfer import CacheFull, CacheSpec, FastPath, KVCacheAdapter, Ledger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class PagedCache(KVCacheAdapter):
    paths: ClassVar[Mapping[str, FastPath]] = {
        "all_rows": FastPath(equals="row_by_row", one_position=True)
    }
    conditions: ClassVar[Sequence[str]] = ("new_block",)

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_blocks, spec.num_heads, spec.block_size, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        self.keys = torch.zeros(shape, dtype=dtype, device=spec.device)
        self.values = torch.zeros_like(self.keys)
        self.unused = list(range(spec.num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        opening = [seq for seq in seqs if self.lengths[seq] % size == 0]
        if len(opening) > len(self.unused):
            raise CacheFull(f"{len(opening)} blocks needed, {len(self.unused)} free")
        for seq in opening:
            self.tables.setdefault(seq, []).append(self.unused.pop(0))
        self.counts["new_block"] += len(opening)
        blocks = [self.tables[seq][-1] for seq in seqs]
        positions = [self.position(seq) for seq in seqs]
        self.write(blocks, positions, key, value)
        self.lengths.update(seqs)

    def position(self, seq: int) -> int:
        """Return the position of the next token in its last block."""
        return self.lengths[seq] % self.spec.block_size

    def write(
        self, blocks: list[int], positions: list[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if len(blocks) > 1 and len(set(positions)) == 1:
            self.counts["all_rows"] += 1
            self.keys[..., positions[0], :][:, blocks] = key.to(self.keys.dtype)
            self.values[..., positions[0], :][:, blocks] = value.to(self.keys.dtype)
        else:
            self.counts["row_by_row"] += 1
            for i, (block, position) in enumerate(zip(blocks, positions, strict=True)):
                self.keys[:, block, :, position] = key[:, i]
                self.values[:, block, :, position] = value[:, i]

    def free(self, seq: int) -> None:
        self.unused += self.tables.pop(seq)
        del self.lengths[seq]

    def peek(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            cache[layer, self.tables[seq]].transpose(1, 2).flatten(0, 1)[: self.lengths[seq]]
            for cache in (self.keys, self.values)
        )
        return keys, values

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  (one for all layers)
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        refcounts = {block: 1 for blocks in self.tables.values() for block in blocks}
        return Ledger(refcounts, self.unused, self.spec.num_blocks)

    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def path_counts(self) -> Mapping[str, int]:
        return self.counts
