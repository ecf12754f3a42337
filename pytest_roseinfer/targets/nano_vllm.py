"""nano-vllm's block manager, driven as its scheduler drives it.

A prompt gets its blocks at once, and begins with what is found of it; a token is appended before
there is room for it, as one that was just sampled is. Full blocks are hashed when they are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_roseinfer.adapters.cache import CacheFull, CacheSpec, KVCacheAdapter, Ledger
from pytest_roseinfer.targets.block_store import BlockStore
from pytest_roseinfer.targets.without_its_top import part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_roseinfer.targets.block_store import KeysAndValues

INSTALL = "clone github.com/GeeeekExplorer/nano-vllm to a folder of PYTHONPATH, and install xxhash"


class NanoVllmAdapter(KVCacheAdapter):
    sharing: ClassVar[str] = "equal prefixes"
    match_leaves: ClassVar[int] = 1
    evicts: ClassVar[str] = "least recent"
    atomic_batches: ClassVar[bool] = False
    # Its own blocks hold a multiple of 256 tokens, by the same code; 1 needs other code.
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 3, 5, 8, 16)

    def make(self, spec: CacheSpec) -> None:
        manager = part_of("nanovllm", "engine.block_manager", INSTALL)
        self.new_sequence: Any = manager.Sequence
        self.new_sequence.block_size = spec.block_size  # as its engine sets it, for all
        self.manager = manager.BlockManager(spec.num_blocks, spec.block_size)
        self.store = BlockStore(spec)
        self.sequences: dict[int, Any] = {}

    def texts(self, said: Sequence[Sequence[int]]) -> None:
        self.coming = said

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        for row, (seq, (token,)) in enumerate(zip(seqs, self.coming, strict=True)):
            rows = key[:, row : row + 1], value[:, row : row + 1]
            if seq not in self.sequences:
                self._begin(seq, self.new_sequence([token]), *rows)
                continue
            sequence = self.sequences[seq]
            sequence.append_token(token)
            if not self.manager.can_append(sequence):
                sequence.token_ids.pop()
                sequence.num_tokens -= 1
                raise CacheFull
            self.manager.may_append(sequence)
            self._store(sequence, *rows)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self.new_sequence(list(self.coming[0])), key, value)

    def _begin(self, seq: int, sequence: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        found = self.manager.can_allocate(sequence)
        if found == -1:
            raise CacheFull
        self.manager.allocate(sequence, found)
        self.sequences[seq] = sequence
        begin = sequence.num_cached_tokens
        self._store(sequence, key[:, begin:], value[:, begin:])

    def _store(self, sequence: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        sequence.num_scheduled_tokens = key.shape[1]
        self.store.write(sequence.block_table, sequence.num_cached_tokens, key, value)
        self.manager.hash_blocks(sequence)
        sequence.num_cached_tokens += sequence.num_scheduled_tokens

    def free(self, seq: int) -> None:
        self.manager.deallocate(self.sequences.pop(seq))

    def preempt(self, seq: int) -> None:
        self.manager.deallocate(self.sequences[seq])

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self.sequences[seq], key, value)

    def matched(self, said: Sequence[int]) -> int:
        # It says what is found only where there is room for the rest.
        with mock.patch.object(self.manager, "free_block_ids", range(1 << 20)):
            blocks = self.manager.can_allocate(self.new_sequence(list(said)))
        return int(blocks) * self.store.block_size

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        return self.store.read(self.table(seq, layer), layer, len(self.sequences[seq]))

    def kept_in(self, seq: int) -> list[int]:
        return self.table(seq, 0)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        blocks: list[int] = self.sequences[seq].block_table
        return blocks

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        manager = self.manager
        held = {block: manager.blocks[block].ref_count for block in manager.used_block_ids}
        cached = {*manager.hash_to_block_id.values()} - manager.used_block_ids
        return Ledger(held, [*manager.free_block_ids], len(manager.blocks), cached)

    def arena(self) -> KeysAndValues:
        return self.store.arena


class WeaklyHashedNanoVllmAdapter(NanoVllmAdapter):
    """Its hashes collide, which takes luck or intent with those of its own."""

    def use_hash(self, hashed: Callable[[object], int]) -> None:
        def compute_hash(tokens: Sequence[int], prefix: int = -1) -> int:
            return hashed((prefix, tuple(tokens)))

        self.manager.compute_hash = compute_hash
