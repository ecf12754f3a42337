"""Caches with preemption and swapping. They are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer import CacheFull, CacheSpec, KVCacheAdapter, Ledger
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Transfer:
    """A sequence that is swapped out, or is being swapped out or in."""

    seq: int
    length: int
    blocks: list[int]
    """Blocks in the cache."""
    space: list[int]
    """Blocks in the swap space."""


class SwapCache(CutCache):
    """Copies as late as allowed, and has a swap space as large as the cache."""

    conditions = ("block_used_while_absent",)
    head_counts = (1, 2)
    head_dims: ClassVar[Sequence[int]] = (4,)
    block_sizes: ClassVar[Sequence[int]] = (2, 4, 1, 3)
    standard_bad_calls: ClassVar[Sequence[str]] = (
        "gather_swapped_out",
        "gather_preempted",
        "append_to_swapped_out",
    )
    bad_call_errors: ClassVar[tuple[type[BaseException], ...]] = (KeyError,)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.space_keys, self.space_values = map(torch.zeros_like, (self.keys, self.values))
        self.space = list(range(spec.num_blocks))
        """Free blocks of the swap space."""
        self.transfers: dict[int, Transfer] = {}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.transfers.keys().isdisjoint(seqs):
            raise KeyError(f"of {seqs}, {[*self.transfers]} are swapped out")
        super().append(seqs, key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        size, tokens = self.spec.block_size, key.shape[1]
        table = self.tables[seq] = self.take_for(tokens)
        self.lengths[seq] += tokens
        for at in range(tokens):
            self.write(table[at // size], at % size, key[:, at], value[:, at])

    def take_for(self, tokens: int) -> list[int]:
        blocks = -(-tokens // self.spec.block_size)
        if blocks > len(self.unused):
            raise CacheFull(f"{blocks} blocks needed, {len(self.unused)} free")
        return [self.take() for _ in range(blocks)]

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq not in self.lengths:
            raise KeyError(f"sequence {seq} is swapped out")
        return self.peek(seq, layer)

    def preempt(self, seq: int) -> None:
        self.drop(self.tables.pop(seq))
        del self.lengths[seq]

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)

    def swap_out(self, seq: int) -> object:
        blocks = self.tables[seq]
        space = [self.space.pop() for _ in blocks]
        self.transfers[seq] = Transfer(seq, self.lengths[seq], blocks, space)
        return self.transfers[seq]

    def finish_swap_out(self, leaving: Any) -> None:
        self.copy_out(leaving)
        self.give_back(leaving)

    def copy_out(self, leaving: Transfer) -> None:
        self.space_keys[:, leaving.space] = self.keys[:, leaving.blocks]
        self.space_values[:, leaving.space] = self.values[:, leaving.blocks]

    def give_back(self, leaving: Transfer) -> None:
        self.drop(self.tables.pop(leaving.seq))
        del self.lengths[leaving.seq]

    def swap_in(self, seq: int) -> object:
        coming = self.transfers[seq]
        coming.blocks = self.tables[seq] = self.take_for(coming.length)
        return coming

    def finish_swap_in(self, coming: Any) -> None:
        self.copy_in(coming)
        self.lengths[coming.seq] = coming.length
        self.space += self.transfers.pop(coming.seq).space

    def copy_in(self, coming: Transfer) -> None:
        self.keys[:, coming.blocks] = self.space_keys[:, coming.space]
        self.values[:, coming.blocks] = self.space_values[:, coming.space]

    def free(self, seq: int) -> None:
        self.drop(self.tables.pop(seq, ()))
        del self.lengths[seq]
        if seq in self.transfers:
            self.space += self.transfers.pop(seq).space

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        swap_state = self.spec.num_blocks - len(self.space)
        return Ledger(dict(self.holders), self.unused, self.spec.num_blocks, swapped=swap_state)


class EagerSwapCache(SwapCache):
    """Copies out at once, and frees the blocks before it returns."""

    swap_out_holds = False

    def swap_out(self, seq: int) -> object:
        leaving = super().swap_out(seq)
        super().finish_swap_out(leaving)
        return leaving

    def finish_swap_out(self, leaving: Any) -> None:
        """Do nothing, as the copy is complete."""


class SharesABlock(Exception):
    """A sequence is not swapped out while another one holds one of its blocks."""


class UnsharedSwapCache(SwapCache):
    """Swaps out only sequences that share no block."""

    swap_shared_errors = (SharesABlock,)

    def swap_out(self, seq: int) -> object:
        if any(self.holders[block] > 1 for block in self.tables[seq]):
            raise SharesABlock(f"sequence {seq}")
        return super().swap_out(seq)


class SwapTextCache(TextCache):
    """Does not find texts that are swapped out, except in blocks that other sequences hold.

    Such shared blocks are not copied back.
    """

    look_up, begin_with = KVCacheAdapter.look_up, KVCacheAdapter.begin_with
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.swapped_out: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}

    def preempt(self, seq: int) -> None:
        self.free(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)

    def swap_out(self, seq: int) -> object:
        return seq

    def finish_swap_out(self, leaving: Any) -> None:
        table = self.tables[leaving]
        self.swapped_out[leaving] = (
            self.token_ids[leaving],
            self.keys[:, table],
            self.values[:, table],
        )
        super().free(leaving)
        for block in table:
            if not self.holders[block]:
                self.block_of.pop(self.key_of.pop(block, None), None)
                self.unused.remove(block)
                self.unused.insert(0, block)  # evicted first, as nothing can find it

    def swap_in(self, seq: int) -> object:
        token_ids = self.swapped_out[seq][0]
        found = self.hold_found(token_ids)
        missing = -(-len(token_ids) // self.spec.block_size) - len(found)
        self.tables[seq] = [*found, *(self.open() for _ in range(missing))]
        return seq, len(found)

    def finish_swap_in(self, coming: Any) -> None:
        seq, found = coming
        token_ids, keys, values = self.swapped_out.pop(seq)
        table = self.tables[seq]
        for at in range(found, len(table)):
            self.keys[:, table[at]], self.values[:, table[at]] = keys[:, at], values[:, at]
        self.token_ids[seq] = token_ids
        self.register_all(seq, token_ids)

    def register_all(self, seq: int, token_ids: Sequence[int]) -> None:
        size, table = self.spec.block_size, self.tables[seq]
        for at in range(len(token_ids) // size):
            up_to = table[: at + 1]
            self.register(up_to, token_ids[: (at + 1) * size])
            table[at] = up_to[-1]

    def free(self, seq: int) -> None:
        self.swapped_out.pop(seq, None)
        self.token_ids.setdefault(seq, [])
        self.tables.setdefault(seq, [])
        super().free(seq)
