"""Block stores: tokens are read and written by blocks or by slots."""

from __future__ import annotations

import pytest
import torch

from pytest_roseinfer import CacheSpec
from pytest_roseinfer.targets.block_manager import BlockStore

SPEC = CacheSpec(num_layers=2, num_heads=3, head_dim=4, block_size=2, num_blocks=5)


def test_writes_by_blocks_and_by_slots_are_read_both_ways() -> None:
    key, value = torch.rand(2, 2, 3, 3, 4)
    by_blocks, by_slots = BlockStore(SPEC), BlockStore(SPEC)
    by_blocks.write([4, 1], 0, key, value)
    by_slots.write_slots(torch.tensor([8, 9, 2]), key, value)
    for store in (by_blocks, by_slots):
        for layer in range(2):
            for result in (
                store.read([4, 1], layer, 3),
                store.read_slots(torch.tensor([8, 9, 2]), layer),
            ):
                assert torch.equal(result[0], key[layer])
                assert torch.equal(result[1], value[layer])


def test_last_slots_of_a_sequence_are_written() -> None:
    store, slots = BlockStore(SPEC), torch.tensor([8, 9, 2])
    key, value = torch.rand(2, 2, 1, 3, 4)
    store.write_slots(slots, key, value)
    keys, values = store.read_slots(slots, 1)
    assert torch.equal(keys, torch.cat([torch.zeros(2, 3, 4), key[1]]))
    assert torch.equal(values, torch.cat([torch.zeros(2, 3, 4), value[1]]))
    assert store.table(slots) == [4, 1]


def test_negative_block_is_refused() -> None:
    """As an index, -1 would be the last block."""
    with pytest.raises(IndexError):
        BlockStore(SPEC).read([0, -1], 0, 2 * SPEC.block_size)
