"""Reserving slots for a writer without a plan, and truncating the unused ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadBlock, Condition, OutOfBlocks
from tests.kv.grouped import block_records
from tests.kv.scene import POLICIES, RejectedCall, assert_rejected, build_scene
from tests.kv.twins import BLOCK_SIZE, Metadata, assert_same_cache, bits, build

if TYPE_CHECKING:
    from roseinfer import KVBlockManager

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def grouped(device: str, *lengths: int) -> tuple[KVBlockManager, list[list[int]]]:
    """Build a cache whose four layers share lists in pairs, and lists of the second pair."""
    kv = build(device, num_layers=4, layers_per_group=2)
    lists: list[list[int]] = [[] for _ in lengths]
    for block_ids, length in zip(lists, lengths, strict=True):
        if length:
            kv.plan_append(2, [block_ids], [length])
    return kv, lists


@all_policies
def test_reserve_has_the_metadata_of_a_plan(device: str, policy: AppendPolicy) -> None:
    """Rows of every condition, some of several blocks; only block copies are written."""
    counts = [1, BLOCK_SIZE, 2, 3 * BLOCK_SIZE, 5]
    reserved, planned = build_scene(device, policy), build_scene(device, policy)
    for scene in (reserved, planned):
        lists = [scene.partial, scene.full, scene.shared, scene.fork, []]
        if scene is reserved:
            scene.kv.reserve(0, lists, counts)
        else:
            scene.kv.plan_append(0, lists, counts)
    assert reserved.lists == planned.lists
    assert_same_cache(reserved.kv, planned.kv)
    conditions = [reserved.kv.path_counts[each] for each in Condition]
    assert conditions == [planned.kv.path_counts[each] for each in Condition]


def test_reserve_copies_a_shared_block_in_all_layers_of_the_group(device: str) -> None:
    """Only the copy changes, and the other holder keeps the block."""
    kv, (block_list,) = grouped(device, BLOCK_SIZE + 1)
    other_list = list(block_list)
    kv.incref_blocks(block_list)
    before = [bits(cache).clone() for cache in (kv.keys, kv.values)]
    kv.reserve(3, [block_list], [BLOCK_SIZE - 1])
    assert block_list[0] == other_list[0]
    assert block_list[1] != other_list[1]
    assert [kv.refcount(block) for block in (other_list[0], other_list[1], block_list[1])] == [
        2,
        1,
        1,
    ]
    assert [kv.block_info(block).length for block in (other_list[1], block_list[1])] == [
        1,
        BLOCK_SIZE,
    ]
    old, new = (block - kv.max_blocks_per_layer for block in (other_list[1], block_list[1]))
    for cache, expected in zip((kv.keys, kv.values), before, strict=True):
        expected[2:, new] = expected[2:, old]
        assert torch.equal(bits(cache), expected)


def test_reserved_slots_can_be_written_and_gathered(device: str) -> None:
    kv, (block_list,) = grouped(device, 0)
    kv.reserve(2, [block_list], [BLOCK_SIZE + 2])
    block = block_list[-1] - kv.max_blocks_per_layer
    token = torch.ones(kv.num_heads, kv.head_dim, device=device)
    kv.keys[2, block, :, 1] = token
    kv.values[2, block, :, 1] = 2 * token
    keys, values = kv.gather_sequence(2, block_list)
    assert keys.shape[1] == BLOCK_SIZE + 2
    assert torch.equal(keys[:, -1], token)
    assert torch.equal(values[:, -1], 2 * token)


REJECTED_CALLS = {
    "out of blocks": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, []], [1, 999]),
        OutOfBlocks,
        r"layer 0 has \d+ free blocks and 250 are needed",
    ),
    "zero tokens": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.full], [1, 0]),
        BadArgument,
        "row 1: cannot append 0 tokens; num_tokens must be 1 or more",
    ),
    "too few counts": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.full], [1]),
        BadArgument,
        "1 token counts for 2 block lists",
    ),
    "unknown layer": RejectedCall(
        lambda scene: (scene.kv.reserve, 9, [scene.partial], [1]), BadArgument, "layer 9 of a cache"
    ),
    "free block": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, [scene.free_id]], [1, 1]),
        BadBlock,
        "is free: no sequence holds it",
    ),
    "block of another layer": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.other_layer], [1, 1]),
        BadBlock,
        "does not belong to layer 0",
    ),
    "same list twice": RejectedCall(
        lambda scene: (scene.kv.reserve, 0, [scene.full, scene.full], [1, 1]),
        BadArgument,
        "row 1 is the same list object as row 0",
    ),
    "truncate beyond the length": RejectedCall(
        lambda scene: (scene.kv.truncate, 0, scene.partial, 3),
        BadArgument,
        "truncate to 3, but 2 tokens are stored",
    ),
    "truncate to a negative length": RejectedCall(
        lambda scene: (scene.kv.truncate, 0, scene.partial, -1),
        BadArgument,
        "truncate to -1, but 2 tokens are stored",
    ),
    "truncate a list of another layer": RejectedCall(
        lambda scene: (scene.kv.truncate, 0, scene.other_layer, 0),
        BadBlock,
        "does not belong to layer 0",
    ),
    "truncate a free block": RejectedCall(
        lambda scene: (scene.kv.truncate, 0, [*scene.full, scene.free_id], 1),
        BadBlock,
        "is free: no sequence holds it",
    ),
    "truncate two sequences as one": RejectedCall(
        lambda scene: (scene.kv.truncate, 0, [*scene.partial, *scene.full], 3),
        BadArgument,
        "holds 2 of 4 tokens and is not the last of its list",
    ),
}


@pytest.mark.parametrize("case", REJECTED_CALLS.values(), ids=REJECTED_CALLS)
def test_rejected_call_changes_nothing(device: str, case: RejectedCall) -> None:
    assert_rejected(build_scene(device, AppendPolicy()), case)


@pytest.mark.parametrize("length", range(2 * BLOCK_SIZE + 2))
def test_truncate_to_any_length(device: str, length: int) -> None:
    """Blocks without tokens left are free; no bit of the cache changes."""
    kv, (block_list, other) = grouped(device, 2 * BLOCK_SIZE + 1, 2)
    before_records, other_records = block_records(kv, block_list), block_records(kv, other)
    free, before = kv.num_free_blocks(2), bits(kv.keys).clone()
    kv.truncate(2, block_list, length)
    num_kept = -(-length // BLOCK_SIZE)
    assert len(block_list) == num_kept
    expected = [
        (at, start, min(BLOCK_SIZE, length - start), refcount)
        for at, start, _, refcount in before_records[:num_kept]
    ]
    assert block_records(kv, block_list) == expected
    assert kv.num_free_blocks(2) == free + len(before_records) - num_kept
    assert block_records(kv, other) == other_records
    assert torch.equal(bits(kv.keys), before)


def test_truncate_releases_shared_blocks(device: str) -> None:
    kv, (block_list,) = grouped(device, 2 * BLOCK_SIZE + 1)
    other_list = list(block_list)
    kv.incref_blocks(block_list)
    free, before_records = kv.num_free_blocks(2), block_records(kv, other_list)
    kv.truncate(2, block_list, BLOCK_SIZE)
    assert block_list == other_list[:1]
    assert kv.num_free_blocks(2) == free
    assert block_records(kv, other_list) == [
        (*fact[:3], 2 - (at > 0)) for at, fact in enumerate(before_records)
    ]


def test_truncate_to_the_same_length_changes_nothing(device: str) -> None:
    """The block keeps its length and its refcount."""
    kv, (block_list,) = grouped(device, BLOCK_SIZE + 1)
    kv.incref_blocks(block_list)
    before = Metadata.of(kv)
    kv.truncate(2, block_list, BLOCK_SIZE + 1)
    assert Metadata.of(kv) == before


@pytest.mark.parametrize("num_reserved", range(1, 2 * BLOCK_SIZE + 1))
def test_truncate_releases_reserved_slots(device: str, num_reserved: int) -> None:
    """Released slots leave no trace; appending continues after the kept tokens."""
    kv, lists = grouped(device, 3)
    twin, twin_lists = grouped(device, 3)
    kv.reserve(2, lists, [num_reserved])
    kv.truncate(2, lists[0], 3)
    assert lists == twin_lists
    assert kv.num_free_blocks(2) == twin.num_free_blocks(2)
    assert block_records(kv, lists[0]) == block_records(twin, twin_lists[0])
    plan = kv.plan_append(2, lists)
    assert plan.positions == [3]
