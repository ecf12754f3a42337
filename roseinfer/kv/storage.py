"""The cache's tensors and the torch operations that move data in and out of them."""

from __future__ import annotations

import torch

from roseinfer.errors import BadArgument
from roseinfer.kv.lasting import lasting

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class KVStorage:
    """Keys and values as ``[layers, blocks, kv_heads, block_size, head_dim]``.

    Blocks and positions are trusted here: the manager has checked them.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], device: torch.device, dtype: torch.dtype
    ):
        if dtype not in DTYPES:
            raise BadArgument(f"a cache of {dtype} is not supported; choose one of {DTYPES}")
        with lasting():
            self.keys = torch.zeros(shape, device=device, dtype=dtype)
            self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.device = self.keys.device
        self.dtype = dtype
        self.key_layers = list(self.keys.unbind(0))
        self.value_layers = list(self.values.unbind(0))
        # [blocks, block_size, heads, head_dim]: block and position index side by side.
        self._key_slots = [layer.transpose(1, 2) for layer in self.key_layers]
        self._value_slots = [layer.transpose(1, 2) for layer in self.value_layers]

    def as_stored(self, new: torch.Tensor) -> torch.Tensor:
        """What will be written for ``new``: the one place where dtypes are converted."""
        if new.requires_grad:
            new = new.detach()
        return new if new.dtype is self.dtype else new.to(self.dtype)

    def write_token(
        self, layer: int, block: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._key_slots[layer][block, position].copy_(key)
        self._value_slots[layer][block, position].copy_(value)

    def write_scalar(
        self, layer: int, block_idx: torch.Tensor, pos: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Every row to the same position of its own block."""
        self.key_layers[layer].select(2, pos).index_copy_(0, block_idx, key)
        self.value_layers[layer].select(2, pos).index_copy_(0, block_idx, value)

    def write_vector(
        self,
        layer: int,
        block_idx: torch.Tensor,
        pos: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Every row to its own position of its own block."""
        self._key_slots[layer].index_put_((block_idx, pos), key)
        self._value_slots[layer].index_put_((block_idx, pos), value)

    def copy_block(self, layer: int, source: int, target: int) -> None:
        self.key_layers[layer][target].copy_(self.key_layers[layer][source])
        self.value_layers[layer][target].copy_(self.value_layers[layer][source])

    def group(self, layers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of consecutive layers."""
        return self.keys[layers.start : layers.stop], self.values[layers.start : layers.stop]

    def clone_blocks(self, layers: range, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks in several layers; every source is read before any target changes."""
        for layer in layers:  # one by one: the copies in between are small enough to be reused
            for cache in (self.key_layers[layer], self.value_layers[layer]):
                cache.index_copy_(0, target, cache.index_select(0, source))

    def gather(
        self, layer: int, blocks: list[int], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``length`` tokens of full blocks in order, as ``[heads, length, head_dim]``."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        keys, values = (
            cache[layer].index_select(0, index).transpose(0, 1).flatten(1, 2)[:, :length]
            for cache in (self.key_layers, self.value_layers)
        )
        return keys, values
