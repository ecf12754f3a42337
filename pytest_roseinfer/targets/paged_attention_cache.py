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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import ContinuousBatchingConfig, GPT2Config
from transformers.generation.continuous_batching import PagedAttentionCache, RequestState
from transformers.generation.continuous_batching.distributed import DistributedHelper

from pytest_roseinfer.adapters.cache import CacheFull, CacheSpec, KVCacheAdapter, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that have their room and their indices and are not written yet."""

    seqs: Sequence[int]
    ends: Sequence[int]
    """How long each sequence is with these tokens."""
    lengths: Mapping[str, list[int]]
    """How many tokens attention reads of each, by kind of layer."""
    padding: int
    columns: Sequence[int] | None
    """The order to bring the tokens into if some are padding, which comes last."""
    completed: Sequence[dict[str, int]]
    """Blocks that each request fills."""
    arguments: Mapping[str, Any]
    """What ``update`` is called with."""


class PagedAttentionCacheAdapter(KVCacheAdapter):
    """Full attention in every layer, with the books of the block manager."""

    allow_block_sharing: ClassVar[bool] = True
    """Also whether full blocks are kept after their requests have ended."""

    def make(self, spec: CacheSpec) -> None:
        self._make(spec, spec.num_blocks)
        (self.allocator,) = self.cache.cache_allocators.values()
        # Where padding is written: the second of two sectors that are never given out.
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
        self.attended: dict[int, list[KeysAndValues]] = {}
        """What attention was handed of a sequence, by layer."""
        self.token_ids = itertools.count()
        self.cache = _build(spec, num_blocks, allow_block_sharing=self.allow_block_sharing, **model)

    # --------------------------------------------------------------------------- writing

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_padded(seqs, key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self.fill(self.reserve(seqs, counts), key, value)

    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        named = [column for column, seq in enumerate(seqs) if seq is not None]
        padding = [column for column, seq in enumerate(seqs) if seq is None]
        rows = [(seq, 1) for seq in seqs if seq is not None]
        columns = named + padding if padding else None
        self.fill(self._prepare(rows, len(padding), columns), key, value)

    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> Batch:
        return self._prepare(list(zip(seqs, counts, strict=True)))

    def _prepare(
        self,
        rows: Sequence[tuple[int, int]],
        padding: int = 0,
        columns: Sequence[int] | None = None,
    ) -> Batch:
        """Make room for ``(sequence, tokens)`` rows, and the arguments that write them."""
        seqs = [seq for seq, _ in rows]
        requests = [(self.states.get(seq) or _new_request(str(seq)), n) for seq, n in rows]
        self._find_room(requests)
        self.states.update((seq, state) for seq, (state, _) in zip(seqs, requests, strict=True))
        completed = [self.cache.count_new_complete_blocks(*request) for request in requests]
        lengths = {
            kind: [allocator.get_seqlen_k(state.position_offset, n) for state, n in requests]
            for kind, allocator in self.cache.cache_allocators.items()
        }
        arguments = {**self._indices(requests, padding), **self._key_lengths(lengths)}
        ends = [state.position_offset for state, _ in requests]
        return Batch(seqs, ends, lengths, padding, columns, completed, arguments)

    def _find_room(self, requests: Sequence[tuple[Any, int]]) -> None:
        """Give every request its blocks, or none of them any."""
        if not self._fit(requests):
            # As the engine does before it takes a request's blocks away.
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
        storable: int = self.cache.count_storable_requests(needed)
        return storable == len(needed)

    def _indices(self, requests: Sequence[tuple[Any, int]], padding: int) -> dict[str, Any]:
        """Where in the cache the tokens of requests are written, and what is read there."""
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
        return {
            "cu_seq_lens_k": {
                kind: self._tensors([[0, *itertools.accumulate(each)]])[0]
                for kind, each in lengths.items()
            },
            "max_length_k": {kind: max(each) for kind, each in lengths.items()},
        }

    def fill(self, reservation: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        for layer in range(self.spec.num_layers):
            states = [
                self._as_states(tensor[layer], reservation.columns) for tensor in (key, value)
            ]
            # The engine spreads these over a call for every layer, and update changes them.
            found = self.cache.update(*states, layer, dict(reservation.arguments))
            self._attend(reservation, layer, [cache[0].transpose(0, 1) for cache in found])
        for seq, completed in zip(reservation.seqs, reservation.completed, strict=True):
            self.cache.mark_complete_blocks(self.states[seq], completed)

    def _as_states(self, tokens: torch.Tensor, columns: Sequence[int] | None) -> torch.Tensor:
        """``[tokens, heads, head_dim]`` as a model hands them over, in the model's own dtype."""
        if columns is not None:
            tokens = tokens[list(columns)]
        return tokens.to(self.dtype).transpose(0, 1)[None]

    def _attend(self, batch: Batch, layer: int, found: Sequence[torch.Tensor]) -> None:
        """Take apart what attention is handed for a batch, and keep it.

        With a sliding window that is only the end of a sequence. What came before it stays
        as it was handed over when it was still seen.
        """
        lengths = batch.lengths[self.cache.layer_to_allocator[layer].layer_type]
        parts = [torch.split(cache, [*lengths, batch.padding]) for cache in found]
        for row, (seq, end) in enumerate(zip(batch.seqs, batch.ends, strict=True)):
            layers = self.attended.setdefault(seq, self._nothing())
            unseen = end - lengths[row]
            keys, values = (
                torch.cat([kept[:unseen], part[row]])
                for kept, part in zip(layers[layer], parts, strict=True)
            )
            layers[layer] = (keys, values)

    def _nothing(self) -> list[KeysAndValues]:
        nothing = torch.empty(
            (0, self.spec.num_heads, self.spec.head_dim),
            dtype=self.dtype,
            device=self.spec.device,
        )
        return [(nothing, nothing)] * self.spec.num_layers

    def free(self, seq: int) -> None:
        self.cache.free_blocks(self.states.pop(seq).request_id)
        self.attended.pop(seq, None)

    # --------------------------------------------------------------------------- reading

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        return self.attended.get(seq, self._nothing())[layer]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        state = self.states[seq]
        length = state.position_offset
        kinds = self.cache.cache_allocators
        entries = torch.zeros(
            (len(kinds), 1, len(self._blocks(seq, layer))),
            dtype=torch.int32,
            device=self.spec.device,
        )
        self.cache.fill_block_table(state.request_id, length, 0, entries[:, 0])
        arguments = {
            "block_table": entries,
            **self._key_lengths({kind: [length] for kind in kinds}),
        }
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
        """Everything, ``[blocks, layers of this kind, 2, page, heads, head_dim]``."""
        spec = self.spec
        stored: torch.Tensor = self.cache.cache_tensor.view(self.dtype).view(
            -1, len(allocator.layer_indices), 2, spec.block_size, spec.num_heads, spec.head_dim
        )
        return stored

    # ----------------------------------------------------------------------------- books

    def table(self, seq: int, layer: int) -> list[int]:
        return self._blocks(seq, layer)

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  one table serves all layers
        pool, books = self.cache.pool, self.allocator.ledger
        surplus = set(self.allocator.block_table["surplus"])
        first = pool.num_reserved_sectors * self.allocator.blocks_per_sector
        blocks = set(range(first, first + self.allocator.num_blocks)) - surplus
        # Full blocks that nobody holds stay filled until room is needed.
        free = [*self._free_blocks(), *books.cached_blocks]
        held = blocks - set(free)
        return Ledger(
            {block: books.shared_ref_counts.get(block, 1) for block in held}, free, len(blocks)
        )

    def _free_blocks(self) -> list[int]:
        """Blocks of the sectors in use that are free, and those of the free sectors."""
        pool, size = self.cache.pool, self.allocator.blocks_per_sector
        # The pool shows how many there are; which they are it keeps to itself.
        trees = pool._free_blocks[self.allocator.index].trees.values()
        free = [block for tree in trees for block in tree]
        claimed = pool.count_free_blocks(self.allocator.index)
        free = [*free, *[-1] * (claimed - len(free))][:claimed]
        return free + [
            block
            for sector in pool.free_sectors
            for block in range(sector * size, (sector + 1) * size)
        ]

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


def _build(spec: CacheSpec, num_blocks: int, *, allow_block_sharing: bool, **model: Any) -> Any:
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
        allow_block_sharing=allow_block_sharing,
    )
    alone = DistributedHelper(None, None)
    with _no_advice():
        return PagedAttentionCache(
            config, batching, spec.device, alone, dtype=getattr(torch, spec.dtype)
        )


@contextmanager
def _no_advice() -> Iterator[None]:
    """Without psutil every new cache logs that memory cannot be measured; once was enough."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled
