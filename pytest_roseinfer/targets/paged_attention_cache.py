"""transformers' paged cache, driven as its own continuous batching drives it.

A sequence is a request. Room is asked for, request by request; read and write indices are
made; ``update`` writes and reads every layer; blocks that became full are registered. To reserve
is to prepare a batch while the one before it still runs, and padding is what CUDA graphs need.

What attention was handed is one route back (``gather``). The other (``peek``) is the block
table and the views of the cache that the engine gives its decode kernel, which needs a GPU: its
way of writing is not offered. Nor is sharing between equal prompts.
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
from pytest_roseinfer.targets.attended import behind, nothing_attended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues

    Requests = Sequence[tuple[Any, int]]

# Builds transformers' paged cache, without a model.


def new_cache(
    spec: CacheSpec, num_blocks: int, dtype: torch.dtype, *, sharing: bool, **model: Any
) -> Any:
    """Build a cache for a model, of which nothing matters but its sizes and its kinds of layers.

    GPT-2 has no rotary embedding, which would refuse odd head sizes.
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
    # Without psutil every new cache logs that memory cannot be measured.
    with mock.patch.object(logging.getLogger("ContinuousBatchingLogger"), "disabled", True):
        return PagedAttentionCache(config, batching, spec.device, alone, dtype=dtype)


# What transformers' paged cache shows of its storage, and of who holds which block.


SURPLUS = "surplus"
"""A request that never ends has the blocks by which the size was rounded up to whole sectors."""


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
    # Full blocks that nobody holds stay filled until room is needed.
    free += books.cached_blocks
    held = blocks - set(free)
    counts = {block: books.shared_ref_counts.get(block, 1) for block in held}
    return Ledger(counts, free, len(blocks), num_free=len(free) - not_counted)


# Room for requests in transformers' paged cache, asked for as its continuous batching does.


def find_room(cache: Any, requests: Requests) -> None:
    """Give every request blocks for so many more tokens, or none of them any."""
    if not _fit(cache, requests):
        # The engine does so before it takes a request's blocks away.
        cache.evict_cached_blocks()
        if not _fit(cache, requests):
            raise CacheFull(f"no room for {[count for _, count in requests]} more tokens")
    for state, count in requests:
        if not cache.can_store_request_tokens(state, count):
            raise RuntimeError(f"request {state.request_id} was promised room and got none")


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


# Requests of transformers' continuous batching, with the indices that are made for each batch.


@dataclass(frozen=True, slots=True)
class Batch:
    """These tokens have their room and their indices and are not written yet."""

    seqs: Sequence[int]
    lengths: Mapping[str, list[int]]
    """How many tokens attention reads of each sequence, by kind of layer."""
    completed: Sequence[dict[str, int]]
    """How many blocks each request fills, by kind of layer."""
    arguments: Mapping[str, Any]
    """What ``update`` is called with."""


def new_request(name: str) -> Any:
    return RequestState(request_id=name, initial_tokens=[])


class PagedRequests:
    """The requests of a cache, by sequence."""

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
        """Say for every allocator where the new tokens are written, and what is read back."""
        allocators = self.cache.cache_allocators.values()
        write: list[list[int]] = [[] for _ in allocators]
        read: list[list[int]] = [[] for _ in allocators]
        # A batch of nothing but new prompts reads nothing back.
        reads = any(state.position_offset for state, _ in requests)
        for state, count in requests:
            self.cache.extend_read_and_write_indices(
                state.request_id, state.position_offset, count, read if reads else None, write
            )
            state.position_offset += count
            # What is stored depends on a sequence's name: no two have the same tokens.
            state.generated_tokens += itertools.islice(self._token_ids, count)
        for allocator, writes, found in zip(allocators, write, read, strict=True):
            writes += [allocator.write_trash_index] * padding
            found += [allocator.read_trash_index] * (padding if reads else 0)
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
        """Write a layer; for each sequence, say where what attention sees begins, and return it."""
        # As a model hands them over: a batch of one row.
        new = (each.transpose(0, 1)[None] for each in (key, value))
        # The engine spreads these over a call for every layer, and update changes them.
        found = self.cache.update(*new, layer, dict(batch.arguments))
        lengths = batch.lengths[self.cache.layer_to_allocator[layer].layer_type]
        # Padding is behind the last end.
        ends = list(itertools.accumulate(lengths))
        parts = [cache[0].transpose(0, 1).tensor_split(ends) for cache in found]
        for row, seq in enumerate(batch.seqs):
            unseen = self.states[seq].position_offset - lengths[row]
            yield unseen, [part[row] for part in parts]

    def stored(self, state: Any, layer: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a request by the block table and the views that a decode kernel is given."""
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


# transformers' paged cache with forks: one prompt that is answered several times.


class ForkedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """A fork shares the full blocks and copies the last one at once if it is partial."""

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


# transformers' paged cache with sliding windows: layers that keep only the last tokens.


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
