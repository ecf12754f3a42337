"""Caches with layer groups, compared with caches of one block list per layer.

The grouped cache plans once and writes per layer; the other appends one token to one layer at a
time. Blocks are allocated in the plan's order (every row's first token, then each row's rest), so
block indices agree and the tensors can be compared whole.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from roseinfer import AppendPlan, AppendPolicy, KVBlockManager
from tests.kv.twins import assert_same_bits, build, random_words

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = 2
LAYERS = 4


class GroupTwins:
    """Sequences of one layer group in both caches: ``lists``, and ``slow_lists[layer]``."""

    def __init__(
        self,
        device: str,
        policy: AppendPolicy = AppendPolicy(),  # noqa: B008  (frozen)
        *,
        group: int = 1,
        dtype: torch.dtype = torch.float32,
        lengths: Sequence[int] = (),
    ) -> None:
        self.fast = build(device, policy, dtype=dtype, num_layers=LAYERS, layers_per_group=GROUP)
        self.slow = build(device, AppendPolicy(triton=False), dtype=dtype, num_layers=LAYERS)
        self.layers = range(group * GROUP, (group + 1) * GROUP)
        self.lists: list[list[int]] = []
        self.slow_lists: dict[int, list[list[int]]] = {layer: [] for layer in self.layers}
        self._seeds = random.Random(0)
        for length in lengths:
            self.start(length)

    def start(self, length: int = 0) -> int:
        row = len(self.lists)
        for lists in (self.lists, *self.slow_lists.values()):
            lists.append([])
        if length:
            self.append([row], [length])
        return row

    def fork(self, row: int) -> int:
        self.fast.incref_blocks(self.lists[row])
        self.lists.append(list(self.lists[row]))
        for lists in self.slow_lists.values():
            self.slow.incref_blocks(lists[row])
            lists.append(list(lists[row]))
        return len(self.lists) - 1

    def tokens(self, count: int) -> torch.Tensor:
        shape = (count, self.fast.num_heads, self.fast.head_dim)
        words = random_words(shape, self.fast.dtype, self._seeds.getrandbits(40))
        return words.to(self.fast.device)

    def plan(self, rows: Sequence[int], counts: Sequence[int] | None = None) -> AppendPlan:
        lists = [self.lists[row] for row in rows]
        return self.fast.plan_append(self.layers.start, lists, counts)

    def append(self, rows: Sequence[int], counts: Sequence[int] | None = None) -> AppendPlan:
        """Do one step in both caches: a plan and a write per layer, and single tokens."""
        plan = self.plan(rows, counts)
        for layer in self.layers:
            total = len(rows) if counts is None else sum(counts)
            key, value = self.tokens(total), self.tokens(total)
            self.fast.write(plan, layer, key, value)
            self.append_per_token(layer, rows, counts or [1] * len(rows), key, value)
        return plan

    def append_per_token(
        self,
        layer: int,
        rows: Sequence[int],
        counts: Sequence[int],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Append the same tokens one by one: every row's first, then each row's others."""
        starts = [sum(counts[:index]) for index in range(len(rows))]
        order = [(row, start) for row, start in zip(rows, starts, strict=True)]
        for row, start, count in zip(rows, starts, counts, strict=True):
            order += [(row, start + offset) for offset in range(1, count)]
        for row, token in order:
            self.slow.append_token(layer, self.slow_lists[layer][row], key[token], value[token])

    def check(self) -> None:
        """Assert equal bits everywhere, and equal lists, refcounts and lengths of all blocks."""
        assert_same_bits(self.fast.keys, self.slow.keys, "keys")
        assert_same_bits(self.fast.values, self.slow.values, "values")
        for layer in self.layers:
            assert self.fast.num_free_blocks(layer) == self.slow.num_free_blocks(layer)
            for fast_list, slow_list in zip(self.lists, self.slow_lists[layer], strict=True):
                assert block_records(self.fast, fast_list) == block_records(self.slow, slow_list)


def block_records(kv: KVBlockManager, block_ids: list[int]) -> list[tuple[int, int, int, int]]:
    """Return the index, start, length and refcount of every block of a list."""
    infos = [(kv.block_info(block), kv.refcount(block)) for block in block_ids]
    return [(info.block_index, info.start, info.length, refcount) for info, refcount in infos]
