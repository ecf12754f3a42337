"""transformers' paged cache with sliding windows: layers that keep only the last tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.targets.paged_attention_cache import ForkedPagedAttentionCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.paged_attention_cache import KeysAndValues

_MOST_SEQUENCES = 10
"""As many as a history keeps alive at once, and some more."""
_ALIGNMENT = 128
"""Bytes that the size of a sector is a multiple of."""


class SlidingPagedAttentionCacheAdapter(ForkedPagedAttentionCacheAdapter):
    """Sliding windows, in every layer or in every other one.

    Layers of each kind have a table of their own and share the pool, which is more than the
    harness can follow: what is compared is what attention reads, and what is stored.
    """

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "layers": ("alternating", "sliding"),
        "window": (3, 1, 2, 5, 16),
    }
    table = KVCacheAdapter.table  # not offered
    ledger = KVCacheAdapter.ledger  # not offered
    arena = KVCacheAdapter.arena  # not offered

    def make(self, spec: CacheSpec) -> None:
        every = 2 if spec.options["layers"] == "alternating" else 1
        kinds = [
            "full_attention" if layer % every else "sliding_attention"
            for layer in range(spec.num_layers)
        ]
        self.window = int(spec.options["window"])
        # Forks share nothing in sliding layers.
        num_blocks = spec.num_blocks * _MOST_SEQUENCES
        # A sector goes to one kind of layers, and the last one of each may be nearly empty.
        page = spec.block_size * spec.num_heads * spec.head_dim * 2
        page *= torch.empty((), dtype=getattr(torch, spec.dtype)).element_size()
        num_blocks += 2 * _ALIGNMENT // math.gcd(_ALIGNMENT, page)
        self._make(spec, num_blocks, layer_types=kinds, sliding_window=self.window)

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        """The storage itself, after what has slid out of it."""
        allocator = self.cache.layer_to_allocator[layer]
        length = self.states[seq].position_offset
        ring = self.window if allocator.layer_type == "sliding_attention" else max(length, 1)
        kept = min(length, ring)
        slots = [at % ring for at in range(length - kept, length)]
        table, size = self._blocks(seq, layer), self.spec.block_size
        blocks = [table[slot // size] for slot in slots]
        positions = [slot % size for slot in slots]
        stored = self._storage(allocator)[:, allocator.layer_indices.index(layer)]
        keys, values = (
            torch.cat([before[: length - kept], stored[blocks, kind, positions]])
            for kind, before in enumerate(self.gather(seq, layer))
        )
        return keys, values
