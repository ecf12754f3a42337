"""The keys and values of a cache whose own part is the books: which block is whose.

A block manager names blocks, and a kernel writes to them. This stands in for the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.cache import CacheSpec

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def read_blocks(
    arena: KeysAndValues, layer: int, table: Sequence[int | None], length: int, begin: int = 0
) -> KeysAndValues:
    """Read tokens ``begin`` to ``length`` of blocks, ``[tokens, heads, head_dim]`` each.

    Blocks whose tokens all come before ``begin`` may be None.
    """
    block_size = arena[0].shape[3]
    left_out = begin // block_size
    blocks = torch.tensor(table[left_out:], dtype=torch.int64, device=arena[0].device)
    tokens = slice(begin - left_out * block_size, length - left_out * block_size)
    keys, values = (
        stored[layer].index_select(0, blocks).transpose(1, 2).flatten(0, 1)[tokens]
        for stored in arena
    )
    return keys, values


class BlockStore:
    """Blocks of zeros, written and read by tables."""

    def __init__(self, spec: CacheSpec, num_blocks: int | None = None) -> None:
        """``num_blocks`` counts those too that no sequence may use."""
        blocks = spec.num_blocks if num_blocks is None else num_blocks
        shape = (spec.num_layers, blocks, spec.num_heads, spec.block_size, spec.head_dim)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.block_size = spec.block_size
        self.arena: KeysAndValues = (
            torch.zeros(shape, dtype=dtype, device=spec.device),
            torch.zeros(shape, dtype=dtype, device=spec.device),
        )

    def write(
        self,
        table: Sequence[int | None],
        begin: int,
        key: torch.Tensor,
        value: torch.Tensor,
        layers: slice | Sequence[int] = slice(None),
    ) -> None:
        """Write ``[layers, tokens, heads, head_dim]`` of one sequence, from position ``begin``.

        Only some ``layers`` of it are written, where not all have this table.
        """
        for at in range(key.shape[1]):
            block, slot = table[(begin + at) // self.block_size], (begin + at) % self.block_size
            for stored, new in zip(self.arena, (key, value), strict=True):
                stored[layers, block, :, slot] = new[layers, at].to(stored.dtype)

    def read(
        self, table: Sequence[int | None], layer: int, length: int, begin: int = 0
    ) -> KeysAndValues:
        """Read tokens ``begin`` to ``length`` of a sequence, ``[tokens, heads, head_dim]`` each."""
        return read_blocks(self.arena, layer, table, length, begin)

    def write_slots(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[layers, tokens, heads, head_dim]`` to the last of a sequence's slots.

        Slots count the tokens of all blocks.
        """
        blocks, places = self._places(slots[-key.shape[1] :])
        for stored, new in zip(self.arena, (key, value), strict=True):
            stored[:, blocks, :, places] = new.transpose(0, 1).to(stored.dtype)

    def read_slots(self, slots: torch.Tensor, layer: int) -> KeysAndValues:
        """Read the tokens of some slots, ``[tokens, heads, head_dim]`` each."""
        blocks, places = self._places(slots)
        keys, values = (stored[layer, blocks, :, places] for stored in self.arena)
        return keys, values

    def table(self, slots: torch.Tensor) -> list[int]:
        """Return the blocks of slots that begin with the first one of a block."""
        return [slot // self.block_size for slot in slots[:: self.block_size].tolist()]

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.block_size, slots % self.block_size
