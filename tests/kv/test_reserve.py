"""Reserving slots for a writer without a plan, and truncating the unused ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadBlock, Condition, OutOfBlocks
from tests.kv.grouped import facts
from tests.kv.scene import POLICIES, Refused, assert_refused, set_up
from tests.kv.twins import BLOCK_SIZE, Metadata, assert_same_cache, bits, build

if TYPE_CHECKING:
    from roseinfer import KVBlockManager

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def grouped(device: str, *lengths: int) -> tuple[KVBlockManager, list[list[int]]]:
    """Make a cache whose four layers share lists in pairs, and lists of the second pair."""
    kv = build(device, num_layers=4, layers_per_group=2)
    lists: list[list[int]] = [[] for _ in lengths]
    for block_ids, length in zip(lists, lengths, strict=True):
        if length:
            kv.plan_append(2, [block_ids], [length])
    return kv, lists


@every_policy
def test_the_books_are_those_of_a_plan(device: str, policy: AppendPolicy) -> None:
    """Rows of every condition, some of several blocks; only block copies are written."""
    counts = [1, BLOCK_SIZE, 2, 3 * BLOCK_SIZE, 5]
    reserved, planned = set_up(device, policy), set_up(device, policy)
    for scene in (reserved, planned):
        lists = [scene.partial, scene.full, scene.shared, scene.sharing, []]
        if scene is reserved:
            scene.kv.reserve(0, lists, counts)
        else:
            scene.kv.plan_append(0, lists, counts)
    assert reserved.lists == planned.lists
    assert_same_cache(reserved.kv, planned.kv)
    conditions = [reserved.kv.path_counts[each] for each in Condition]
    assert conditions == [planned.kv.path_counts[each] for each in Condition]


def test_a_shared_block_is_copied_in_all_layers_of_its_group(device: str) -> None:
    """Only the copy changes, and the other holder keeps the block."""
    kv, (mine,) = grouped(device, BLOCK_SIZE + 1)
    yours = list(mine)
    kv.incref_blocks(mine)
    before = [bits(cache).clone() for cache in (kv.keys, kv.values)]
    kv.reserve(3, [mine], [BLOCK_SIZE - 1])
    assert mine[0] == yours[0]
    assert mine[1] != yours[1]
    assert [kv.refcount(block) for block in (yours[0], yours[1], mine[1])] == [2, 1, 1]
    assert [kv.block_info(block).length for block in (yours[1], mine[1])] == [1, BLOCK_SIZE]
    old, new = (block - kv.max_blocks_per_layer for block in (yours[1], mine[1]))
    for cache, was in zip((kv.keys, kv.values), before, strict=True):
        was[2:, new] = was[2:, old]
        assert torch.equal(bits(cache), was)


def test_what_was_reserved_can_be_written_and_gathered(device: str) -> None:
    kv, (mine,) = grouped(device, 0)
    kv.reserve(2, [mine], [BLOCK_SIZE + 2])
    block = mine[-1] - kv.max_blocks_per_layer
    token = torch.ones(kv.num_heads, kv.head_dim, device=device)
    kv.keys[2, block, :, 1] = token
    kv.values[2, block, :, 1] = 2 * token
    keys, values = kv.gather_sequence(2, mine)
    assert keys.shape[1] == BLOCK_SIZE + 2
    assert torch.equal(keys[:, -1], token)
    assert torch.equal(values[:, -1], 2 * token)


REFUSED = {
    "no room": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, []], [1, 999]),
        OutOfBlocks,
        r"layer 0 has \d+ free blocks and 250 are needed",
    ),
    "no tokens": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.full], [1, 0]),
        BadArgument,
        "row 1: cannot append 0 tokens; num_tokens must be 1 or more",
    ),
    "too few counts": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.full], [1]),
        BadArgument,
        "1 token counts for 2 block lists",
    ),
    "no such layer": Refused(
        lambda scene: (scene.kv.reserve, 9, [scene.partial], [1]), BadArgument, "layer 9 of a cache"
    ),
    "a free block": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, [scene.free_id]], [1, 1]),
        BadBlock,
        "is free: no sequence holds it",
    ),
    "another layer's": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.partial, scene.other_layer], [1, 1]),
        BadBlock,
        "does not belong to layer 0",
    ),
    "a list twice": Refused(
        lambda scene: (scene.kv.reserve, 0, [scene.full, scene.full], [1, 1]),
        BadArgument,
        "row 1 is the same list object as row 0",
    ),
    "longer than it is": Refused(
        lambda scene: (scene.kv.truncate, 0, scene.partial, 3),
        BadArgument,
        "truncate to 3, but 2 tokens are stored",
    ),
    "less than nothing": Refused(
        lambda scene: (scene.kv.truncate, 0, scene.partial, -1),
        BadArgument,
        "truncate to -1, but 2 tokens are stored",
    ),
    "cut another layer's": Refused(
        lambda scene: (scene.kv.truncate, 0, scene.other_layer, 0),
        BadBlock,
        "does not belong to layer 0",
    ),
    "cut a free block": Refused(
        lambda scene: (scene.kv.truncate, 0, [*scene.full, scene.free_id], 1),
        BadBlock,
        "is free: no sequence holds it",
    ),
    "not one sequence": Refused(
        lambda scene: (scene.kv.truncate, 0, [*scene.partial, *scene.full], 3),
        BadArgument,
        "holds 2 of 4 tokens and is not the last of its list",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_call_that_is_refused_changes_nothing(device: str, case: Refused) -> None:
    assert_refused(set_up(device, AppendPolicy()), case)


@pytest.mark.parametrize("length", range(2 * BLOCK_SIZE + 2))
def test_cut_to_any_length(device: str, length: int) -> None:
    """Blocks without tokens left are free; no bit of the cache changes."""
    kv, (mine, other) = grouped(device, 2 * BLOCK_SIZE + 1, 2)
    was, others = facts(kv, mine), facts(kv, other)
    free, before = kv.num_free_blocks(2), bits(kv.keys).clone()
    kv.truncate(2, mine, length)
    kept = -(-length // BLOCK_SIZE)
    assert len(mine) == kept
    want = [(at, start, min(BLOCK_SIZE, length - start), held) for at, start, _, held in was[:kept]]
    assert facts(kv, mine) == want
    assert kv.num_free_blocks(2) == free + len(was) - kept
    assert facts(kv, other) == others
    assert torch.equal(bits(kv.keys), before)


def test_whole_blocks_that_others_hold_are_let_go(device: str) -> None:
    kv, (mine,) = grouped(device, 2 * BLOCK_SIZE + 1)
    yours = list(mine)
    kv.incref_blocks(mine)
    free, was = kv.num_free_blocks(2), facts(kv, yours)
    kv.truncate(2, mine, BLOCK_SIZE)
    assert mine == yours[:1]
    assert kv.num_free_blocks(2) == free
    assert facts(kv, yours) == [(*fact[:3], 2 - (at > 0)) for at, fact in enumerate(was)]


def test_a_shared_block_can_stay_as_it_is(device: str) -> None:
    """It is kept whole."""
    kv, (mine,) = grouped(device, BLOCK_SIZE + 1)
    kv.incref_blocks(mine)
    before = Metadata.of(kv)
    kv.truncate(2, mine, BLOCK_SIZE + 1)
    assert Metadata.of(kv) == before


@pytest.mark.parametrize("more", range(1, 2 * BLOCK_SIZE + 1))
def test_what_was_not_written_goes_back(device: str, more: int) -> None:
    """Released room leaves no trace; appending continues after the kept tokens."""
    kv, lists = grouped(device, 3)
    twin, twin_lists = grouped(device, 3)
    kv.reserve(2, lists, [more])
    kv.truncate(2, lists[0], 3)
    assert lists == twin_lists
    assert kv.num_free_blocks(2) == twin.num_free_blocks(2)
    assert facts(kv, lists[0]) == facts(twin, twin_lists[0])
    plan = kv.plan_append(2, lists)
    assert plan.positions == [3]
