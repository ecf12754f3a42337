"""Reads back what the block manager stores, by three routes, and what its books say."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from pytest_roseinfer.adapters.cache import Ledger
from pytest_roseinfer.targets.block_store import read_blocks
from pytest_roseinfer.targets.own.block_lists import BlockLists
from roseinfer import AttentionPath, LayerTraits, load_attention_kernels, paged_attention_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.targets.block_store import KeysAndValues


class ReadManager(BlockLists):
    """Sequences are read from the storage, as the manager gathers them, and by attention."""

    def arena(self) -> KeysAndValues:
        return self.manager.keys, self.manager.values

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        infos = [self.manager.block_info(block_id) for block_id in self.block_ids(seq, layer)]
        first_layer = self.manager.groups[self.manager.group_of(layer)].layers[0]
        for at, info in enumerate(infos):
            if (info.layer, info.start) != (first_layer, at * self.spec.block_size):
                raise AssertionError(f"block {at} of the list has the record {info}")
        length = sum(info.length for info in infos)
        return read_blocks(self.arena(), layer, self.table(seq, layer), length)

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        keys, values = self.manager.gather_sequence(layer, self.block_ids(seq, layer))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def attend(self, seqs: Sequence[int], query: torch.Tensor, layer: int) -> torch.Tensor:
        manager, traits = self.manager, LayerTraits(self.spec.head_dim**-0.5)
        lists = [self.block_ids(seq, layer) for seq in seqs]
        kernels = load_attention_kernels(manager.device) if manager.policy.triton else None
        if kernels is None:
            self.attended[AttentionPath.REFERENCE.value] += 1
            return paged_attention_reference(manager, layer, query, lists, [1] * len(seqs), traits)
        self.attended[AttentionPath.DECODE_TRITON.value] += 1
        lengths = [sum(manager.block_info(each).length for each in own) for own in lists]
        # Rows of the table are filled up with the scratch block.
        columns = zip_longest(*(self.table(seq, layer) for seq in seqs), fillvalue=0)
        return kernels.decode(
            query,
            *manager.caches(layer),
            torch.tensor(list(zip(*columns, strict=True)), device=manager.device),
            torch.tensor(lengths, device=manager.device),
            traits,
        )

    def ledger(self, layer: int) -> Ledger:
        manager, first = self.manager, self.first_id(layer)
        counts = {
            block: manager.refcount(first + block)
            for block in range(1, manager.max_blocks_per_layer)
        }
        held = {block: count for block, count in counts.items() if count}
        # The manager shows how many blocks are free, not which.
        free = [block for block, count in counts.items() if not count]
        num_free = manager.num_free_blocks(layer)
        return Ledger(held, free, self.spec.num_blocks, num_free=num_free)
