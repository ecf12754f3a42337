"""What a step of one sequence computes, to compare one kernel with several before the first one.

They add up in one order by design, but by other instructions: `mma.sync` in place of `wgmma`, or of
what GPUs to come have. It is looked at on this GPU, with this model's weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.kv.manager import KVBlockManager

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.models.causal import CausalModel

_CONTEXTS = (0, 20, 129, 300)
"""Tokens before the step: none, one part of a context, and several parts."""
_TOKENS = 8
"""Random tokens for each context: few sums are rounded differently when their order differs."""


class WholeStepTrial:
    """One sequence of numbers drawn by chance, in a cache of its own."""

    def __init__(self, model: CausalModel, like: AttentionBackend) -> None:
        """Attend as ``like`` does, and have blocks as its cache has them."""
        shape, kv = model.shape, like.kv
        self._model = model
        self._contexts = [min(context, shape.max_length - 1) for context in _CONTEXTS]
        blocks = max(self._contexts) // kv.block_size + 1
        self.kv = KVBlockManager(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, kv.block_size, blocks + 1,
            kv.device, kv.dtype, layers_per_group=shape.num_layers,
        )  # fmt: skip
        self._attention = type(like)(model.traits, self.kv, like.staging, self.kv.path_counts)
        self._table = torch.arange(blocks, 0, -1, device=kv.device)[None]

    @torch.inference_mode()
    def computed(self) -> list[Tensor]:
        """Return the logits of steps, and the block of keys and values that each step writes to."""
        caches = [each for layer in range(self.kv.num_layers) for each in self.kv.caches(layer)]
        draw = torch.Generator(self.kv.device).manual_seed(0)
        for cache in caches:
            cache.normal_(generator=draw)
        shape = (len(self._contexts), _TOKENS, 1)
        tokens = torch.randint(
            self._model.shape.vocab_size, shape, generator=draw, device=self.kv.device
        )
        found = []
        for context, drawn in zip(self._contexts, tokens, strict=True):
            length = torch.full_like(drawn[0], context)
            block = self._table[0, context // self.kv.block_size]
            self._attention.prepare(ResidentBatch([self._table], length))
            for token in drawn:
                found.append(self._model.logits(token, length, None, self._attention).clone())
                found += [cache[block].clone() for cache in caches]
        return found
