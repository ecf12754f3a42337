"""Requests of transformers' continuous batching, with the indices that are made for each batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching import RequestState

from pytest_roseinfer.targets.of_transformers.paged_room import find_room

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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
