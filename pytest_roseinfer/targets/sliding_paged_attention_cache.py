"""transformers' paged cache with sliding windows: layers that keep only the last tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.targets.attended import behind
from pytest_roseinfer.targets.forked_paged_attention_cache import ForkedPagedAttentionCacheAdapter
from pytest_roseinfer.targets.of_transformers.paged_books import storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues


class SlidingPagedAttentionCacheAdapter(ForkedPagedAttentionCacheAdapter):
    """Sliding windows, in every layer or in every other one.

    Layers of each kind have a table of their own and share the pool, which the harness cannot
    follow: it compares what attention reads and what is stored, and no books.
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
        # Forks share nothing in sliding layers, and a history keeps fewer than 10 sequences.
        num_blocks = 10 * spec.num_blocks
        # A sector goes to one kind of layers, and the last one of each may be nearly empty. Its
        # bytes are a multiple of 128.
        token = 2 * spec.num_heads * spec.head_dim * getattr(torch, spec.dtype).itemsize
        num_blocks += 2 * 128 // math.gcd(128, spec.block_size * token)
        self._make(spec, num_blocks, layer_types=kinds, sliding_window=self.window)

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        """Read the storage itself; what has slid out of it comes from ``gather``."""
        allocator = self.cache.layer_to_allocator[layer]
        length = self.states[seq].position_offset
        ring = self.window if allocator.layer_type == "sliding_attention" else max(length, 1)
        unseen = max(0, length - ring)
        table, size = self._blocks(seq, layer), self.spec.block_size
        slots = [at % ring for at in range(unseen, length)]
        blocks = [table[slot // size] for slot in slots]
        positions = [slot % size for slot in slots]
        every = storage(self.cache, self.spec, self.dtype, allocator)
        stored = every[:, allocator.layer_indices.index(layer)]
        kept = (stored[blocks, kind, positions] for kind in (0, 1))
        return behind(self.gather(seq, layer), unseen, kept)
