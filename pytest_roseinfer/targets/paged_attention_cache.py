"""Adapter of transformers' paged cache, driven as by its continuous batching.

A sequence is a request. Room is allocated request by request, read and write indices are made,
``update`` writes and reads each layer, and blocks that became full are registered. ``reserve``
prepares a batch while the previous one still runs, and padding is as for CUDA graphs.

The cache is read back in two ways: the keys and values that attention got (``gather``), and by the
block table and the cache views that the engine passes to its decode kernel (``peek``). That kernel
needs a GPU, so its way of writing is not tested. Neither is sharing between equal prompts.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from transformers import ContinuousBatchingConfig, GPT2Config
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from transformers.generation.continuous_batching.distributed import DistributedHelper

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheFull, CacheSpec, Ledger
from pytest_roseinfer.targets.attention_context import empty_context, prepend_unseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.targets.attention_context import KeysAndValues

    Requests = Sequence[tuple[Any, int]]

# Construction of the cache, without a model.


def new_cache(
    spec: CacheSpec, num_blocks: int, dtype: torch.dtype, *, sharing: bool, **model: Any
) -> Any:
    """Build a cache for a model config; only the sizes and the layer types matter.

    It is GPT-2's, because rotary embeddings would refuse odd head sizes.
    """
    heads = {"n_head": spec.num_heads, "n_embd": spec.num_heads * spec.head_dim}
    config = GPT2Config(n_layer=spec.num_layers, **heads, **model)
    batching = ContinuousBatchingConfig(
        page_size=spec.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=64,
        max_memory_percent=0.9,
        max_blocks_per_request=num_blocks,
        allow_block_sharing=sharing,
    )
    alone = DistributedHelper(None, None)
    # Without psutil, each new cache would log that memory cannot be measured.
    with mock.patch.object(logging.getLogger("ContinuousBatchingLogger"), "disabled", True):
        return PagedAttentionCache(config, batching, spec.device, alone, dtype=dtype)


# Storage and ledger of the cache.


SURPLUS = "surplus"
"""Name of a request that never ends, for blocks added by rounding up to whole sectors."""


def storage(cache: Any, spec: CacheSpec, dtype: torch.dtype, allocator: Any) -> torch.Tensor:
    """View the whole cache as ``[blocks, layers of this kind, 2, page, heads, head_dim]``."""
    shape = spec.block_size, spec.num_heads, spec.head_dim
    stored: torch.Tensor = cache.cache_tensor.view(dtype)
    return stored.view(-1, len(allocator.layer_indices), 2, *shape)


def ledger_of(pool: Any, allocator: Any) -> Ledger:
    size, books = allocator.blocks_per_sector, allocator.ledger
    first = pool.num_reserved_sectors * size
    blocks = set(range(first, first + allocator.num_blocks))
    blocks -= set(allocator.block_table[SURPLUS])
    # The pool shows how many blocks of the sectors in use are free, but not which.
    trees = pool._free_blocks[allocator.index].trees.values()
    free = [block for tree in trees for block in tree]
    not_counted = len(free) - pool.count_free_blocks(allocator.index)
    for sector in pool.free_sectors:
        free += range(sector * size, (sector + 1) * size)
    # Full blocks without holders stay cached until room is needed.
    free += books.cached_blocks
    held_blocks = blocks - set(free)
    counts = {block: books.shared_ref_counts.get(block, 1) for block in held_blocks}
    return Ledger(counts, free, len(blocks), num_free=len(free) - not_counted)


# Allocation, as in continuous batching.


def find_room(cache: Any, requests: Requests) -> None:
    """Allocate blocks for more tokens of each request, or for none of them."""
    if not _fit(cache, requests):
        # The engine does so before it preempts a request.
        cache.evict_cached_blocks()
        if not _fit(cache, requests):
            raise CacheFull(f"no room for {[count for _, count in requests]} more tokens")
    for state, count in requests:
        if not cache.can_store_request_tokens(state, count):
            raise RuntimeError(
                f"request {state.request_id} did not get the room that was counted as free"
            )


def _fit(cache: Any, requests: Requests) -> bool:
    cache.pool.try_to_free_sectors()
    needed = [
        {
            kind: allocator.needs_new_blocks(state.request_id, state.current_len(), count)
            for kind, allocator in cache.cache_allocators.items()
        }
        for state, count in requests
    ]
    return bool(cache.count_storable_requests(needed) == len(needed))


# Requests, and the indices of batches.


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens with room and indices that are not written yet."""

    seqs: Sequence[int]
    lengths: Mapping[str, list[int]]
    """Number of tokens that attention reads of each sequence, by layer type."""
    completed: Sequence[dict[str, int]]
    """Number of blocks that each request fills, by layer type."""
    arguments: Mapping[str, Any]
    """Arguments of ``update``."""


def new_request(name: str) -> Any:
    return RequestState(request_id=name, initial_tokens=[])


class PagedRequests:
    """Requests of a cache, by sequence."""

    def __init__(self, cache: Any, device: str) -> None:
        self.cache, self.device = cache, device
        self.states: dict[int, Any] = {}
        self._token_ids = itertools.count()

    def reserve(self, seqs: Sequence[int], counts: Sequence[int], padding: int) -> Batch:
        states = [self.states.get(seq) or new_request(str(seq)) for seq in seqs]
        requests = list(zip(states, counts, strict=True))
        find_room(self.cache, requests)
        self.states.update(zip(seqs, states, strict=True))
        completed = [self.cache.count_new_complete_blocks(*request) for request in requests]
        lengths = {
            kind: [allocator.get_seqlen_k(state.position_offset, n) for state, n in requests]
            for kind, allocator in self.cache.cache_allocators.items()
        }
        arguments = {**self._indices(requests, padding), **self.key_lengths(lengths)}
        return Batch(seqs, lengths, completed, arguments)

    def _indices(self, requests: Sequence[tuple[Any, int]], padding: int) -> dict[str, Any]:
        """Return the write indices of new tokens and the read indices, of each allocator."""
        allocators = self.cache.cache_allocators.values()
        write: list[list[int]] = [[] for _ in allocators]
        read: list[list[int]] = [[] for _ in allocators]
        # A batch with only new prompts reads nothing back.
        reads = any(state.position_offset for state, _ in requests)
        for state, count in requests:
            self.cache.extend_read_and_write_indices(
                state.request_id, state.position_offset, count, read if reads else None, write
            )
            state.position_offset += count
            # Stored values depend on the sequence's name, so no two sequences have equal tokens.
            state.generated_tokens += itertools.islice(self._token_ids, count)
        for allocator, writes, reads_of in zip(allocators, write, read, strict=True):
            writes += [allocator.write_trash_index] * padding
            reads_of += [allocator.read_trash_index] * (padding if reads else 0)
        return {"read_index": self._tensors(read), "write_index": self._tensors(write)}

    def _tensors(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [torch.tensor(row, dtype=torch.int64, device=self.device) for row in rows]

    def key_lengths(self, lengths: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        ends = self._tensors([[0, *itertools.accumulate(each)] for each in lengths.values()])
        return {
            "cu_seq_lens_k": dict(zip(lengths, ends, strict=True)),
            "max_length_k": {kind: max(each) for kind, each in lengths.items()},
        }

    def update(
        self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Write a layer; yield, per sequence, the number of hidden tokens and the visible ones."""
        # In a model's format: a batch of one row.
        new = (each.transpose(0, 1)[None] for each in (key, value))
        # A copy, because the engine unpacks the arguments for each layer, and update changes them.
        cached = self.cache.update(*new, layer, dict(batch.arguments))
        lengths = batch.lengths[self.cache.layer_to_allocator[layer].layer_type]
        # Padding comes after the last end.
        ends = list(itertools.accumulate(lengths))
        parts = [cache[0].transpose(0, 1).tensor_split(ends) for cache in cached]
        for row, seq in enumerate(batch.seqs):
            unseen = self.states[seq].position_offset - lengths[row]
            yield unseen, [part[row] for part in parts]

    def stored(self, state: Any, layer: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a request by the block table and the views that a decode kernel gets."""
        kinds, length = self.cache.cache_allocators, state.position_offset
        shape = (len(kinds), 1, num_blocks)
        blocks = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.cache.fill_block_table(state.request_id, length, 0, blocks[:, 0])
        lengths = self.key_lengths({kind: [length] for kind in kinds})
        arguments = {"block_table": blocks, **lengths}
        nothing = torch.empty(0)
        self.cache.update(nothing, nothing, layer, arguments)
        pages = arguments["block_table"][0].long()
        keys, values = (
            arguments[name][pages].flatten(0, 1)[:length] for name in ("k_cache", "v_cache")
        )
        return keys, values


class PagedAttentionCacheAdapter(KVCacheAdapter):
    """Adapter with full attention in all layers, which also checks the block manager's books."""

    allow_block_sharing: ClassVar[bool] = True
    """True to keep full blocks cached after their requests have ended."""

    def make(self, spec: CacheSpec) -> None:
        self._make(spec, spec.num_blocks)
        (self.allocator,) = self.cache.cache_allocators.values()
        # Two sectors are never allocated; padding is written to the second one.
        sector = self.allocator.blocks_per_sector
        self.scratch_blocks = frozenset(range(sector, 2 * sector))
        # The size is rounded up to whole sectors; a request that never ends holds the surplus.
        surplus = (self.cache.num_blocks - spec.num_blocks) * spec.block_size
        if not self.cache.can_store_request_tokens(new_request(SURPLUS), surplus):
            raise RuntimeError(f"a new cache has no room for {surplus} tokens")

    def _make(self, spec: CacheSpec, num_blocks: int, **model: Any) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.attended = empty_context(spec)
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
            visible = self.requests.update(reservation, layer, *new)
            for seq, (unseen, visible_pair) in zip(reservation.seqs, visible, strict=True):
                layers = self.attended[seq]
                layers[layer] = prepend_unseen(layers[layer], unseen, visible_pair)
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
    """Adapter without block sharing: blocks are free as soon as their request ends."""

    allow_block_sharing = False


# Forks: several completions of one prompt.


class ForkedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """Adapter with forks, which share full blocks and copy a partial last block at once."""

    fork_shares = "full blocks"

    def fork(self, parent: int, child: int) -> None:
        self.cache.pool.try_to_free_sectors()
        state, name = self.states[parent], str(child)
        copies: dict[str, tuple[list[int], list[int]]]
        copies = {kind: ([], []) for kind in self.cache.cache_allocators}
        if not self.cache.prepare_fork_request(state, [name], copies):
            self.cache.evict_cached_blocks()
            if not self.cache.prepare_fork_request(state, [name], copies):
                raise CacheFull(f"no room for a fork of request {state.request_id}")
        self.cache.perform_cache_copy(copies)
        self.states[child] = state.fork(name)
        self.attended[child] = list(self.attended[parent])


# Sliding windows.


class SlidingPagedAttentionCacheAdapter(ForkedPagedAttentionCacheAdapter):
    """Adapter with sliding windows, in all layers or in every other one.

    Each layer type has its own table in a shared pool, which the harness does not support: it
    compares what attention reads and what is stored, but not the books.
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
        # A sector belongs to one layer type, and the last one of each may be nearly empty. Its
        # size in bytes is a multiple of 128.
        token = 2 * spec.num_heads * spec.head_dim * getattr(torch, spec.dtype).itemsize
        num_blocks += 2 * 128 // math.gcd(128, spec.block_size * token)
        self._make(spec, num_blocks, layer_types=kinds, sliding_window=self.window)

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        """Read the storage; tokens that slid out of it come from ``gather``."""
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
        pair = (stored[blocks, kind, positions] for kind in (0, 1))
        return prepend_unseen(self.gather(seq, layer), unseen, pair)
