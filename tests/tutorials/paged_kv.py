"""A small paged KV cache of the usual kind: forks share blocks, with copy-on-write.

It imports nothing of this project, as it stands for a user's own cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class NoBlocks(Exception):
    pass


class Seq:
    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0


class PagedKV:
    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        shape = (layers, blocks, block_size, heads, dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.size = block_size
        self.refs = [0] * blocks
        self.spare = list(range(blocks - 1, -1, -1))

    def extend(self, seqs: Sequence[Seq], k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one token for each sequence; k and v are [layers, sequences, heads, dim]."""
        if self._needs(seqs) > len(self.spare):
            raise NoBlocks
        for row, seq in enumerate(seqs):
            at = seq.length % self.size
            if at == 0:
                seq.blocks.append(self._take())
            else:
                self._own_last(seq)
            block = seq.blocks[-1]
            self.k[:, block, at] = k[:, row]
            self.v[:, block, at] = v[:, row]
            seq.length += 1

    def fork(self, seq: Seq) -> Seq:
        child = Seq()
        child.blocks = list(seq.blocks)
        child.length = seq.length
        for block in child.blocks:
            self.refs[block] += 1
        return child

    def drop(self, seq: Seq) -> None:
        """Free the blocks of a sequence, which is then empty and may be used again."""
        for block in seq.blocks:
            self._drop(block)
        seq.blocks = []
        seq.length = 0

    def cut(self, seq: Seq, length: int) -> None:
        """Keep the first tokens of a sequence, for example when drafts were rejected."""
        keep = -(-length // self.size)
        for block in seq.blocks[keep:]:
            self._drop(block)
        del seq.blocks[keep:]
        seq.length = length

    def read(self, seq: Seq, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a sequence, [tokens, heads, dim]."""
        k = self.k[layer, seq.blocks].flatten(0, 1)[: seq.length]
        v = self.v[layer, seq.blocks].flatten(0, 1)[: seq.length]
        return k, v

    def _take(self) -> int:
        block = self.spare.pop()
        self.refs[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.spare.append(block)

    def _needs(self, seqs: Sequence[Seq]) -> int:
        """Return the number of blocks that one more token for each sequence takes."""
        refs: dict[int, int] = {}
        need = 0
        for seq in seqs:
            if seq.length % self.size == 0:
                need += 1
                continue
            last = seq.blocks[-1]
            held = refs.get(last, self.refs[last])
            if held > 1:
                refs[last] = held - 1
                need += 1
        return need

    def _own_last(self, seq: Seq) -> None:
        """Make the last block of a sequence its own, so that it may be written to."""
        old = seq.blocks[-1]
        if self.refs[old] == 1:
            return
        new = self._take()
        used = seq.length % self.size
        self.k[:, new, :used] = self.k[:, old, :used]
        self.v[:, new, :used] = self.v[:, old, :used]
        self._drop(old)
        seq.blocks[-1] = new
