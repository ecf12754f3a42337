"""transformers' paged cache, driven as its own continuous batching drives it.

A sequence is a request. Its tokens go the way the scheduler and the input preparation of
``transformers.generation.continuous_batching`` send them: room is asked for, request by
request; read and write indices are made; ``update`` writes and reads every layer; blocks
that became full are registered; a finished request is freed. To reserve is to prepare a
batch while the one before it still runs, as its asynchronous batching does, and padding is
what it adds for CUDA graphs.

What attention was handed is one route back (``gather``). The other (``peek``) is the block
table and the views of the cache that the engine gives its decode kernel. That kernel writes
by itself and needs a GPU, so its way of writing is not offered. Nor is sharing between
equal prompts, because no two sequences of a history have the same tokens.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from transformers import ContinuousBatchingConfig, GPT2Config
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from transformers.generation.continuous_batching.distributed import DistributedHelper

from pytest_roseinfer.adapters.cache import CacheFull, CacheSpec, KVCacheAdapter, Ledger
from pytest_roseinfer.targets.attended import behind, nothing_attended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues


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
        if not self.cache.can_store_request_tokens(_new_request("surplus"), surplus):
            raise RuntimeError(f"a new cache has no room for {surplus} tokens")

    def _make(self, spec: CacheSpec, num_blocks: int, **model: Any) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.states: dict[int, Any] = {}
        self.attended = nothing_attended(spec)
        self.token_ids = itertools.count()
        # Nothing of a model matters but its sizes and its kinds of layers. GPT-2 has no rotary
        # embedding, which would refuse odd head sizes.
        config = GPT2Config(
            n_layer=spec.num_layers,
            n_head=spec.num_heads,
            n_embd=spec.num_heads * spec.head_dim,
            **model,
        )
        batching = ContinuousBatchingConfig(
            page_size=spec.block_size,
            num_blocks=num_blocks,
            max_batch_tokens=64,
            max_memory_percent=0.9,
            max_blocks_per_request=num_blocks,
            allow_block_sharing=self.allow_block_sharing,
        )
        alone = DistributedHelper(None, None)
        # Without psutil every new cache logs that memory cannot be measured.
        with mock.patch.object(logging.getLogger("ContinuousBatchingLogger"), "disabled", True):
            self.cache = PagedAttentionCache(config, batching, spec.device, alone, dtype=self.dtype)

    # --------------------------------------------------------------------------- writing

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many(seqs, [1] * len(seqs), key, value)

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
        states = [self.states.get(seq) or _new_request(str(seq)) for seq in seqs]
        requests = list(zip(states, counts, strict=True))
        self._find_room(requests)
        self.states.update(zip(seqs, states, strict=True))
        completed = [self.cache.count_new_complete_blocks(*request) for request in requests]
        lengths = {
            kind: [allocator.get_seqlen_k(state.position_offset, n) for state, n in requests]
            for kind, allocator in self.cache.cache_allocators.items()
        }
        arguments = {**self._indices(requests, padding), **self._key_lengths(lengths)}
        return Batch(seqs, lengths, completed, arguments)

    def _find_room(self, requests: Sequence[tuple[Any, int]]) -> None:
        """Give every request its blocks, or none of them any."""
        if not self._fit(requests):
            # The engine does so before it takes a request's blocks away.
            self.cache.evict_cached_blocks()
            if not self._fit(requests):
                raise CacheFull(f"no room for {[count for _, count in requests]} more tokens")
        for state, count in requests:
            if not self.cache.can_store_request_tokens(state, count):
                raise RuntimeError(f"request {state.request_id} was promised room and got none")

    def _fit(self, requests: Sequence[tuple[Any, int]]) -> bool:
        self.cache.pool.try_to_free_sectors()
        needed = [
            {
                kind: allocator.needs_new_blocks(state.request_id, state.current_len(), count)
                for kind, allocator in self.cache.cache_allocators.items()
            }
            for state, count in requests
        ]
        return bool(self.cache.count_storable_requests(needed) == len(needed))

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
            state.generated_tokens += itertools.islice(self.token_ids, count)
        for allocator, writes, found in zip(allocators, write, read, strict=True):
            writes += [allocator.write_trash_index] * padding
            found += [allocator.read_trash_index] * (padding if reads else 0)
        return {"read_index": self._tensors(read), "write_index": self._tensors(write)}

    def _tensors(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [torch.tensor(row, dtype=torch.int64, device=self.spec.device) for row in rows]

    def _key_lengths(self, lengths: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        ends = self._tensors([[0, *itertools.accumulate(each)] for each in lengths.values()])
        return {
            "cu_seq_lens_k": dict(zip(lengths, ends, strict=True)),
            "max_length_k": {kind: max(each) for kind, each in lengths.items()},
        }

    def fill(self, reservation: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            # As a model hands them over: its own dtype, and a batch of one row.
            new = (each[layer].to(self.dtype).transpose(0, 1)[None] for each in (key, value))
            # The engine spreads these over a call for every layer, and update changes them.
            found = self.cache.update(*new, layer, dict(reservation.arguments))
            lengths = reservation.lengths[self.cache.layer_to_allocator[layer].layer_type]
            ends = list(itertools.accumulate(lengths))
            # Padding is behind the last end.
            parts = [cache[0].transpose(0, 1).tensor_split(ends) for cache in found]
            for row, seq in enumerate(reservation.seqs):
                unseen = self.states[seq].position_offset - lengths[row]
                layers, seen = self.attended[seq], [part[row] for part in parts]
                layers[layer] = behind(layers[layer], unseen, seen)
        for seq, completed in zip(reservation.seqs, reservation.completed, strict=True):
            self.cache.mark_complete_blocks(self.states[seq], completed)

    def free(self, seq: int) -> None:
        self.cache.free_blocks(self.states.pop(seq).request_id)
        self.attended.pop(seq, None)

    # --------------------------------------------------------------------------- reading

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        return self.attended[seq][layer]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        length = self.states[seq].position_offset
        kinds = self.cache.cache_allocators
        shape = (len(kinds), 1, len(self._blocks(seq, layer)))
        blocks = torch.zeros(shape, dtype=torch.int32, device=self.spec.device)
        self.cache.fill_block_table(self.states[seq].request_id, length, 0, blocks[:, 0])
        arguments = {"block_table": blocks, **self._key_lengths({kind: [length] for kind in kinds})}
        nothing = torch.empty(0)
        self.cache.update(nothing, nothing, layer, arguments)
        pages = arguments["block_table"][0].long()
        keys, values = (
            arguments[name][pages].flatten(0, 1)[:length] for name in ("k_cache", "v_cache")
        )
        return keys, values

    def _blocks(self, seq: int, layer: int) -> list[int]:
        allocator = self.cache.layer_to_allocator[layer]
        return list(allocator.block_table[self.states[seq].request_id])

    def _storage(self, allocator: Any) -> torch.Tensor:
        """View the whole cache as ``[blocks, layers of this kind, 2, page, heads, head_dim]``."""
        spec = self.spec
        stored: torch.Tensor = self.cache.cache_tensor.view(self.dtype).view(
            -1, len(allocator.layer_indices), 2, spec.block_size, spec.num_heads, spec.head_dim
        )
        return stored

    # ----------------------------------------------------------------------------- books

    def table(self, seq: int, layer: int) -> Sequence[int | None]:
        return self._blocks(seq, layer)

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  one table serves all layers
        pool, books = self.cache.pool, self.allocator.ledger
        size = self.allocator.blocks_per_sector
        first = pool.num_reserved_sectors * size
        blocks = set(range(first, first + self.allocator.num_blocks))
        blocks -= set(self.allocator.block_table["surplus"])
        # The pool shows how many blocks of the sectors in use are free, but not which.
        trees = pool._free_blocks[self.allocator.index].trees.values()
        free = [block for tree in trees for block in tree]
        claimed = pool.count_free_blocks(self.allocator.index)
        free = [*free, *[-1] * (claimed - len(free))][:claimed]
        for sector in pool.free_sectors:
            free += range(sector * size, (sector + 1) * size)
        # Full blocks that nobody holds stay filled until room is needed.
        free += books.cached_blocks
        held = blocks - set(free)
        return Ledger(
            {block: books.shared_ref_counts.get(block, 1) for block in held}, free, len(blocks)
        )

    def arena(self) -> KeysAndValues:
        stored = self._storage(self.allocator)
        keys, values = (stored[:, :, kind].permute(1, 0, 3, 2, 4) for kind in (0, 1))
        return keys, values


class UnsharedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """Blocks go back to the pool as soon as their request ends."""

    allow_block_sharing = False


class ForkedPagedAttentionCacheAdapter(PagedAttentionCacheAdapter):
    """Forked requests, as made for one prompt that is answered several times.

    A fork shares the full blocks and copies the last one at once if it is partial.
    """

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


def _new_request(name: str) -> Any:
    return RequestState(request_id=name, initial_tokens=[])
