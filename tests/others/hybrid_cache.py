"""Adapters of transformers' ``DynamicCache`` with layers that also have a recurrent state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import DynamicCache, GPT2Config

from pytest_roseinfer.targets.dynamic_cache import DynamicCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import CacheSpec


class HybridCacheAdapter(DynamicCacheAdapter):
    """Adapter with hybrid layers, whose rows are selected as in beam search."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"select": ("reorder_cache",)}

    def new_cache(self) -> Any:
        layers = self.spec.num_layers
        return DynamicCache(config=GPT2Config(n_layer=layers, layer_types=["hybrid"] * layers))

    def use_states(self, states: torch.Tensor) -> None:
        self.states = states.clone()

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        super().append_many(seqs, counts, key, value)
        last = torch.tensor(counts).cumsum(0) - 1
        state_of = dict(zip(seqs, self.states[:, last].unbind(1), strict=True))
        for rows in dict.fromkeys(self.home[seq] for seq in seqs):
            states = torch.stack([state_of[seq] for seq in rows.seqs], 1).to(self.dtype)
            for layer, state in enumerate(states):
                rows.cache.update_recurrent_state(state, layer)

    def peek_state(self, seq: int) -> torch.Tensor:
        rows = self.home[seq]
        row = rows.seqs.index(seq)
        return torch.stack([layer.recurrent_states[0][row] for layer in rows.cache.layers])

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        return length == stored  # a recurrent state cannot go back


class SelectsHybridRows(HybridCacheAdapter):
    """Selects rows as contrastive search does."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "select": ("batch_select_indices", "batch_repeat_interleave")
    }
