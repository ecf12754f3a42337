"""Adapter of nano-vllm's block manager, driven as by its scheduler.

A prompt gets all its blocks at once and starts with the cached prefix. A token is appended before
its room is allocated, as for one that was just sampled. Full blocks are hashed when stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_roseinfer.capabilities.cache_data import CacheFull, Ledger
from pytest_roseinfer.targets.block_manager import BlockManagerAdapter
from pytest_roseinfer.targets.partial_import import import_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

INSTALL = "clone github.com/GeeeekExplorer/nano-vllm to a folder of PYTHONPATH, and install xxhash"


class NanoVllmAdapter(BlockManagerAdapter):
    """nano-vllm's block manager."""

    prefixes = BlockManagerAdapter.prefixes.but(evicts="least recent")
    # It uses multiples of 256 tokens, by the same code; blocks of 1 token need other code.
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 3, 5, 8, 16)

    def manage(self, spec: CacheSpec) -> None:
        manager = import_part("nanovllm", "engine.block_manager", INSTALL)
        self.new_sequence: Any = manager.Sequence
        self.new_sequence.block_size = spec.block_size  # a class attribute, as its engine sets it
        self.manager = manager.BlockManager(spec.num_blocks, spec.block_size)
        self.sequences: dict[int, Any] = {}

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:  # noqa: ARG002
        resumed = seq in self.preempted
        sequence = self.sequences[seq] if resumed else self.new_sequence(list(token_ids))
        blocks = self.manager.can_allocate(sequence)
        if blocks == -1:
            raise CacheFull
        self.manager.allocate(sequence, blocks)
        self.sequences[seq] = sequence
        num_cached: int = sequence.num_cached_tokens
        return num_cached

    def extend(self, seq: int, token: int) -> None:
        sequence = self.sequences[seq]
        sequence.append_token(token)
        if not self.manager.can_append(sequence):
            sequence.token_ids.pop()
            sequence.num_tokens -= 1
            raise CacheFull
        self.manager.may_append(sequence)

    def stored(self, seq: int, tokens: int) -> None:
        sequence = self.sequences[seq]
        sequence.num_scheduled_tokens = tokens
        self.manager.hash_blocks(sequence)
        sequence.num_cached_tokens += tokens

    def release(self, seq: int) -> None:
        self.manager.deallocate(self.sequences[seq])

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        # ``can_allocate`` returns the cached blocks only if the rest has room.
        with mock.patch.object(self.manager, "free_block_ids", range(1 << 20)):
            blocks = self.manager.can_allocate(self.new_sequence(list(token_ids)))
        return int(blocks) * self.spec.block_size

    def container(self, seq: int) -> list[int]:
        return self.table(seq, 0)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        blocks: list[int] = self.sequences[seq].block_table
        return blocks

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        manager = self.manager
        refcounts = {block: manager.blocks[block].ref_count for block in manager.used_block_ids}
        cached = {*manager.hash_to_block_id.values()} - manager.used_block_ids
        return Ledger(refcounts, [*manager.free_block_ids], len(manager.blocks), cached)


class WeaklyHashedNanoVllmAdapter(NanoVllmAdapter):
    """Adapter with a weak hash function, so that hashes of blocks collide."""

    def use_hash(self, hash_function: Callable[[object], int]) -> None:
        def compute_hash(tokens: Sequence[int], prefix: int = -1) -> int:
            return hash_function((prefix, tuple(tokens)))

        self.manager.compute_hash = compute_hash
