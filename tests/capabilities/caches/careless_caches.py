"""A paged cache that refuses every standard bad call, and variants that accept some."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer import CacheFull, KVCacheAdapter, Ledger
from pytest_roseinfer.capabilities.misuse import catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import CacheSpec

    Pair = tuple[torch.Tensor, torch.Tensor]


class Refused(ValueError):
    pass


class CarefulCache(KVCacheAdapter):
    """Refcounts blocks, copies the partial block of a fork at once, and has block 0 as scratch."""

    fork_shares = "full blocks"
    scratch_blocks = frozenset({0})
    standard_bad_calls = tuple(
        name
        for name, each in catalogue(KVCacheAdapter).items()
        # ``SwapCache``, ``TreeCache``, ``BeamCache`` and ``PushedCache`` refuse the others.
        if each.needs.isdisjoint(
            {"preempt", "swap_out", "append_trees", "reorder", "begin_receive"}
        )
    )
    bad_call_errors = (Refused,)

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        blocks = spec.num_blocks + 1
        shape = (spec.num_layers, blocks, spec.num_heads, spec.block_size, spec.head_dim)
        self.store = torch.zeros((2, *shape), dtype=getattr(torch, spec.dtype))
        self.unused = list(range(1, blocks))
        self.holders: Counter[int] = Counter()
        self.filled: Counter[int] = Counter()
        self.tables: dict[int, list[int]] = {}

    # ---------------------------------------------------------------------- sequences

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.check_tokens(len(seqs), key, value)
        self.check_names(seqs)
        lists = {seq: self.tables.get(seq, []) for seq in seqs}
        self.write(list(lists.values()), key, value)
        self.tables.update(lists)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if seq in self.tables:
            raise Refused(seq)
        count = key.shape[1]
        if -(-count // self.spec.block_size) > len(self.unused):
            raise CacheFull
        own: list[int] = []
        for at in range(count):
            self.write([own], key[:, at : at + 1], value[:, at : at + 1])
        self.tables[seq] = own

    def fork(self, parent: int, child: int) -> None:
        own = self.table_of(parent)
        if child in self.tables:
            raise Refused(child)
        partial = own[-1:] if self.filled[own[-1]] < self.spec.block_size else []
        if len(partial) > len(self.unused):
            raise CacheFull
        self.tables[child] = own[: len(own) - len(partial)]
        self.holders.update(self.tables[child])
        for block in partial:
            self.tables[child].append(self.take())
            copy = self.tables[child][-1]
            self.store[:, :, copy] = self.store[:, :, block]
            self.filled[copy] = self.filled[block]

    def free(self, seq: int) -> None:
        own = self.table_of(seq)
        del self.tables[seq]
        for block in own:
            self.drop(block)

    def peek(self, seq: int, layer: int) -> Pair:
        return self.read(layer, self.tables[seq])

    def gather(self, seq: int, layer: int) -> Pair:
        return self.read(layer, self.table_of(seq))

    # ------------------------------------------------------------------------- blocks

    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:  # noqa: ARG002
        self.check_held(blocks)
        if any(times > self.holders[block] for block, times in Counter(blocks).items()):
            raise Refused(blocks)
        for block in blocks:
            self.drop(block)

    def incref_blocks(self, layer: int, blocks: Sequence[int]) -> None:  # noqa: ARG002
        self.check_held(blocks)
        self.holders.update(blocks)

    def gather_blocks(self, layer: int, blocks: list[int], length: int | None) -> object:
        self.check_held(blocks)
        self.check_length(sum(self.filled[block] for block in blocks), length)
        return self.read(layer, blocks)

    def append_to_blocks(
        self, layer: int, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        del layer
        for own in lists:
            self.check_held(own)
        self.check_lists(lists)
        self.write(lists, key, value)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        return Ledger(dict(+self.holders), self.unused, self.spec.num_blocks)

    def arena(self) -> Pair:
        return self.store[0], self.store[1]

    # ------------------------------------------------------------------------- checks

    def check_tokens(self, rows: int, key: torch.Tensor, value: torch.Tensor) -> None:
        spec = self.spec
        shape = (spec.num_layers, rows, spec.num_heads, spec.head_dim)
        if not key.shape == value.shape == shape or not key.is_floating_point():
            raise Refused(key.shape, value.shape)

    def check_names(self, seqs: Sequence[int]) -> None:
        if len(set(seqs)) < len(seqs):
            raise Refused(seqs)

    def table_of(self, seq: int) -> list[int]:
        if seq not in self.tables:
            raise Refused(seq)
        return self.tables[seq]

    def check_held(self, blocks: Sequence[int]) -> None:
        if not all(self.holders[block] > 0 for block in blocks):
            raise Refused(blocks)

    def check_length(self, stored: int, length: int | None) -> None:
        if length is not None and not 0 <= length <= stored:
            raise Refused(length)

    def check_lists(self, lists: list[list[int]]) -> None:
        last = [own[-1] for own in lists if own]
        if len(set(last)) < len(last):
            raise Refused(lists)

    # --------------------------------------------------------------------------- work

    def write(self, lists: list[list[int]], key: torch.Tensor, value: torch.Tensor) -> None:
        size = self.spec.block_size
        opening = [not own or self.filled[own[-1]] == size for own in lists]
        if sum(opening) > len(self.unused):
            raise CacheFull
        for i, own in enumerate(lists):
            if opening[i]:
                own.append(self.take())
            block = own[-1]
            at = self.filled[block]
            self.store[0][:, block, :, at] = key[:, i]
            self.store[1][:, block, :, at] = value[:, i]
            self.filled[block] += 1

    def read(self, layer: int, own: list[int]) -> Pair:
        length = sum(self.filled[block] for block in own)
        both = self.store[:, layer, own].transpose(2, 3).flatten(1, 2)[:, :length]
        return both[0], both[1]

    def take(self) -> int:
        block = self.unused.pop(0)
        self.holders[block], self.filled[block] = 1, 0
        return block

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.unused.append(block)


class TakesAnyBlock(CarefulCache):
    """Does not check the blocks of a call."""

    def check_held(self, blocks: Sequence[int]) -> None:
        pass


class TakesAnyName(CarefulCache):
    """Takes an unknown name for an empty sequence."""

    def table_of(self, seq: int) -> list[int]:
        return self.tables.setdefault(seq, [])


class TakesAnyTokens(CarefulCache):
    """Fails in the middle of a write whose tokens do not fit."""

    def check_tokens(self, rows: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass


class CountsHoldersTooLate(CarefulCache):
    """Checks the refcount of a block after it has freed others."""

    def decref_blocks(self, layer: int, blocks: Sequence[int]) -> None:  # noqa: ARG002
        for block in blocks:
            if self.holders[block] <= 0:
                raise Refused(block)
            self.drop(block)


class ReadsPastTheEnd(CarefulCache):
    def check_length(self, stored: int, length: int | None) -> None:
        pass
