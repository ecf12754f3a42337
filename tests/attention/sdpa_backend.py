"""A third attention backend, by torch's SDPA, to show that one file adds a backend."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, register
from roseinfer.kv.manager import StepBatch


@register
class SdpaAttention(AttentionBackend):
    name: ClassVar[str] = "sdpa"

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        self._batch = batch

    def store_and_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.path_counts["sdpa"] += 1
        match self._batch:
            case ResidentBatch(tables, lengths):
                return self._attend_resident(layer, query, key, value, tables[0], lengths)
            case StepBatch(block_lists=block_lists, counts=counts) as batch:
                batch.write(layer, key, value)
                group = layer // self.kv.layers_per_group
                each = [self.kv.gather_sequence(layer, lists[group]) for lists in block_lists]
                rows = zip(torch.split(query, list(counts)), each, strict=True)
                return torch.cat([self._attend(layer, new, *stored) for new, stored in rows])

    def _attend_resident(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        out = []
        for row in range(len(query)):
            block, position = divmod(int(lengths[row]), self.kv.block_size)
            stored = []
            for cache, new in ((self.kv.keys, key), (self.kv.values, value)):
                cache[layer, tables[row, block], :, position] = new[row]
                blocks = cache[layer, tables[row]].transpose(0, 1).flatten(1, 2)
                stored.append(blocks[:, : int(lengths[row]) + 1])
            out.append(self._attend(layer, query[row : row + 1], *stored))
        return torch.cat(out)

    def _attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Compute the attention of the last ``len(query)`` tokens of one sequence."""
        shared = query.shape[1] // keys.shape[0]
        mask = torch.ones(len(query), keys.shape[1], dtype=torch.bool, device=query.device)
        out = scaled_dot_product_attention(
            query.transpose(0, 1),
            keys.repeat_interleave(shared, 0),
            values.repeat_interleave(shared, 0),
            attn_mask=mask.tril(keys.shape[1] - len(query)),
            scale=self.traits[layer].scale,
        )
        return out.transpose(0, 1)
