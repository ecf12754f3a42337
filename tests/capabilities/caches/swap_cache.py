"""Caches from which sequences are preempted, and swapped out and in. They are right."""

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
    """What is swapped out of a sequence, or is about to be."""

    seq: int
    length: int
    blocks: list[int]
    """In the cache."""
    space: list[int]
    """In the swap space."""


class SwapCache(CutCache):
    """It copies as late as it may. Its swap space is as large as the cache."""

    conditions = ("block_used_while_absent",)
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)
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
        """Blocks of the swap space that are free."""
        self.away: dict[int, Transfer] = {}

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.away.keys().isdisjoint(seqs):
            raise KeyError(f"of {seqs}, {[*self.away]} are away")
        super().append(seqs, key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        size, tokens = self.spec.block_size, key.shape[1]
        table = self.tables[seq] = self.take_for(tokens)
        self.lengths[seq] += tokens
        for at in range(tokens):
            self.keys[:, table[at // size], :, at % size] = key[:, at]
            self.values[:, table[at // size], :, at % size] = value[:, at]

    def take_for(self, tokens: int) -> list[int]:
        blocks = -(-tokens // self.spec.block_size)
        if blocks > len(self.unused):
            raise CacheFull(f"{blocks} blocks needed, {len(self.unused)} free")
        return [self.take() for _ in range(blocks)]

    def gather(self, seq: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if seq not in self.lengths:
            raise KeyError(f"sequence {seq} is away")
        return self.peek(seq, layer)

    def preempt(self, seq: int) -> None:
        self.drop(self.tables.pop(seq))
        del self.lengths[seq]

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)

    def swap_out(self, seq: int) -> object:
        blocks = self.tables[seq]
        space = [self.space.pop() for _ in blocks]
        self.away[seq] = Transfer(seq, self.lengths[seq], blocks, space)
        return self.away[seq]

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
        coming = self.away[seq]
        coming.blocks = self.tables[seq] = self.take_for(coming.length)
        return coming

    def finish_swap_in(self, coming: Any) -> None:
        self.copy_in(coming)
        self.lengths[coming.seq] = coming.length
        self.space += self.away.pop(coming.seq).space

    def copy_in(self, coming: Transfer) -> None:
        self.keys[:, coming.blocks] = self.space_keys[:, coming.space]
        self.values[:, coming.blocks] = self.space_values[:, coming.space]

    def free(self, seq: int) -> None:
        self.drop(self.tables.pop(seq, ()))
        del self.lengths[seq]
        if seq in self.away:
            self.space += self.away.pop(seq).space

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        swapped = self.spec.num_blocks - len(self.space)
        return Ledger(dict(self.holders), self.unused, self.spec.num_blocks, swapped=swapped)


class EagerSwapCache(SwapCache):
    """It copies out at once, and has the blocks free by then."""

    swap_out_holds = False

    def swap_out(self, seq: int) -> object:
        leaving = super().swap_out(seq)
        super().finish_swap_out(leaving)
        return leaving

    def finish_swap_out(self, leaving: Any) -> None:
        """All is done by now."""


class SwapTextCache(TextCache):
    """A text that is swapped out is found no more, but for the blocks that others hold.

    These are not copied back.
    """

    look_up, begin_with = KVCacheAdapter.look_up, KVCacheAdapter.begin_with
    head_counts = (1, 2)
    head_dims = (4,)
    block_sizes = (2, 4, 1, 3)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.out: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}

    def preempt(self, seq: int) -> None:
        self.free(seq)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.prefill(seq, key, value)

    def swap_out(self, seq: int) -> object:
        return seq

    def finish_swap_out(self, leaving: Any) -> None:
        table = self.tables[leaving]
        self.out[leaving] = self.said[leaving], self.keys[:, table], self.values[:, table]
        super().free(leaving)
        for block in table:
            if not self.holders[block]:
                self.block_of.pop(self.key_of.pop(block, None), None)

    def swap_in(self, seq: int) -> object:
        said = self.out[seq][0]
        found = self.hold_found(said)
        missing = -(-len(said) // self.spec.block_size) - len(found)
        self.tables[seq] = [*found, *(self.open() for _ in range(missing))]
        return seq, len(found)

    def finish_swap_in(self, coming: Any) -> None:
        seq, found = coming
        said, keys, values = self.out.pop(seq)
        table = self.tables[seq]
        for at in range(found, len(table)):
            self.keys[:, table[at]], self.values[:, table[at]] = keys[:, at], values[:, at]
        self.said[seq] = said
        self.register_all(seq, said)

    def register_all(self, seq: int, said: Sequence[int]) -> None:
        size, table = self.spec.block_size, self.tables[seq]
        for at in range(len(said) // size):
            up_to = table[: at + 1]
            self.register(up_to, said[: (at + 1) * size])
            table[at] = up_to[-1]

    def free(self, seq: int) -> None:
        self.out.pop(seq, None)
        self.said.setdefault(seq, [])
        self.tables.setdefault(seq, [])
        super().free(seq)
