"""transformers' paged cache, driven as its own continuous batching drives it.

A sequence is a request. Room is asked for, request by request; read and write indices are
made; ``update`` writes and reads every layer; blocks that became full are registered. To reserve
is to prepare a batch while the one before it still runs, and padding is what CUDA graphs need.

What attention was handed is one route back (``gather``). The other (``peek``) is the block
table and the views of the cache that the engine gives its decode kernel, which needs a GPU: its
way of writing is not offered. Nor is sharing between equal prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter, Ledger
from pytest_roseinfer.targets.attended import behind, nothing_attended
from pytest_roseinfer.targets.of_transformers.new_paged_cache import new_cache
from pytest_roseinfer.targets.of_transformers.paged_books import SURPLUS, ledger_of, storage
from pytest_roseinfer.targets.of_transformers.paged_requests import PagedRequests, new_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues
    from pytest_roseinfer.targets.of_transformers.paged_requests import Batch


class PagedAttentionCacheAdapter(KVCacheAdapter):
    """Full attention in every layer, with the books of the block manager."""

    allow_block_sharing: ClassVar[bool] = True
    """With it, full blocks are also kept after their requests have ended."""

    def make(self, spec: CacheSpec) -> None:
        self._make(spec, spec.num_blocks)
        (self.allocator,) = self.cache.cache_allocators.values()
        # Two sectors are never given out; padding is written to the second of them.
        sector = self.allocator.blocks_per_sector
        self.scratch_blocks = frozenset(range(sector, 2 * sector))
        # The size is rounded up to whole sectors; a request that never ends keeps the rest.
        surplus = (self.cache.num_blocks - spec.num_blocks) * spec.block_size
        if not self.cache.can_store_request_tokens(new_request(SURPLUS), surplus):
            raise RuntimeError(f"a new cache has no room for {surplus} tokens")

    def _make(self, spec: CacheSpec, num_blocks: int, **model: Any) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.attended = nothing_attended(spec)
        model["sharing"] = self.allow_block_sharing
        self.cache = new_cache(spec, num_blocks, self.dtype, **model)
        self.requests = PagedRequests(self.cache, spec.device)
        self.states = self.requests.states

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, counts), key, value)

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        named = [seq for seq in seqs if seq is not None]
        # Padding comes last.
        rows = sorted(range(len(seqs)), key=lambda row: seqs[row] is None)
        batch = self.reserve(named, [1] * len(named), padding=len(seqs) - len(named))
        self.fill(batch, key[:, rows], value[:, rows])

    def reserve(self, seqs: Sequence[int], counts: Sequence[int], padding: int = 0) -> Batch:
        return self.requests.reserve(seqs, counts, padding)

    def fill(self, reservation: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            new = [each[layer].to(self.dtype) for each in (key, value)]
            found = self.requests.update(reservation, layer, *new)
            for seq, (unseen, seen) in zip(reservation.seqs, found, strict=True):
                layers = self.attended[seq]
                layers[layer] = behind(layers[layer], unseen, seen)
        for seq, completed in zip(reservation.seqs, reservation.completed, strict=True):
            self.cache.mark_complete_blocks(self.states[seq], completed)

    def free(self, seq: int) -> None:
        self.cache.free_blocks(self.states.pop(seq).request_id)
        self.attended.pop(seq, None)

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        return self.attended[seq][layer]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        return self.requests.stored(self.states[seq], layer, len(self._blocks(seq, layer)))

    def _blocks(self, seq: int, layer: int) -> list[int]:
        allocator = self.cache.layer_to_allocator[layer]
        return list(allocator.block_table[self.states[seq].request_id])

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return self._blocks(seq, layer)

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  one table serves all layers
        return ledger_of(self.cache.pool, self.allocator)

    def arena(self) -> KeysAndValues:
        stored = storage(self.cache, self.spec, self.dtype, self.allocator)
        keys, values = (stored[:, :, kind].permute(1, 0, 3, 2, 4) for kind in (0, 1))
        return keys, values


class UnsharedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """Blocks go back to the pool as soon as their request ends."""

    allow_block_sharing = False
