"""Truncating lists with shared blocks, and many lists at once: all or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadRefcount, KVBlockManager, OutOfBlocks
from tests.kv.grouped import block_records
from tests.kv.scene import POLICIES, RejectedCall, assert_rejected, build_scene
from tests.kv.twins import BLOCK_SIZE, Metadata, bits, build

if TYPE_CHECKING:
    from roseinfer.kv.plan import AppendPlan

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def build_shared(
    device: str, length: int, holders: int, policy: AppendPolicy | None = None, *, blocks: int = 16
) -> tuple[KVBlockManager, list[list[int]]]:
    """Build a cache whose four layers share lists in pairs, and lists with the same blocks."""
    kv = build(
        device,
        policy or AppendPolicy(),
        num_layers=4,
        layers_per_group=2,
        max_blocks_per_layer=blocks,
    )
    first: list[int] = []
    plan = kv.plan_append(2, [first], [length])
    for layer in (2, 3):
        key = torch.rand(length, kv.num_heads, kv.head_dim, device=device)
        kv.write(plan, layer, key, 2 * key)
    lists = [first, *(list(first) for _ in range(holders - 1))]
    for block_ids in lists[1:]:
        kv.incref_blocks(block_ids)
    return kv, lists


@all_policies
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1])
def test_truncated_shared_block_is_copied(device: str, policy: AppendPolicy, length: int) -> None:
    """The other list and its blocks do not change; kept tokens read back the same."""
    kv, (block_list, other_list) = build_shared(device, 2 * BLOCK_SIZE, 2, policy)
    before_state, tokens = (
        block_records(kv, other_list),
        [kv.gather_sequence(layer, other_list) for layer in (2, 3)],
    )
    kv.truncate(2, block_list, length)
    num_kept = -(-length // BLOCK_SIZE)
    assert block_list[: num_kept - 1] == other_list[: num_kept - 1]
    assert block_list[-1] not in other_list
    assert block_records(kv, block_list)[-1][1:] == (
        (num_kept - 1) * BLOCK_SIZE,
        length % BLOCK_SIZE,
        1,
    )
    assert [record[:3] for record in block_records(kv, other_list)] == [
        record[:3] for record in before_state
    ]
    assert [kv.refcount(block) for block in other_list] == [
        1 + (at < num_kept - 1) for at in range(2)
    ]
    for layer, whole in zip((2, 3), tokens, strict=True):
        for kind, now, cut in zip(
            whole,
            kv.gather_sequence(layer, other_list),
            kv.gather_sequence(layer, block_list),
            strict=True,
        ):
            assert torch.equal(bits(kind), bits(now))
            assert torch.equal(bits(kind[:, :length]), bits(cut))
    assert kv.plan_append(2, [block_list]).positions == [length % BLOCK_SIZE]


def test_last_truncated_list_keeps_the_block(device: str) -> None:
    kv, lists = build_shared(device, BLOCK_SIZE, 3)
    block, free = lists[0][0], kv.num_free_blocks(2)
    kv.truncate_batch(2, lists, [1, 2, 3])
    assert [block_ids == [block] for block_ids in lists] == [False, False, True]
    assert [block_records(kv, block_ids)[0][1:] for block_ids in lists] == [
        (0, n, 1) for n in (1, 2, 3)
    ]
    assert kv.num_free_blocks(2) == free - 2


def test_released_block_serves_the_copy(device: str) -> None:
    kv, (block_list, other_list) = build_shared(device, BLOCK_SIZE, 2, blocks=3)
    kv.reserve(2, [block_list], [1])
    assert kv.num_free_blocks(2) == 0
    released_block = block_list[-1]
    kv.truncate(2, block_list, 1)
    assert block_list == [released_block]
    assert block_records(kv, other_list) == [(*block_records(kv, other_list)[0][:2], BLOCK_SIZE, 1)]


@all_policies
def test_no_copy_writes_to_a_block_that_another_copy_reads(
    device: str, policy: AppendPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block copied by one list and freed by the next is reused for the third's copy."""
    kv, (block_list, other_list) = build_shared(device, BLOCK_SIZE, 2, policy, blocks=5)
    first: list[int] = []
    third = torch.rand(BLOCK_SIZE, kv.num_heads, kv.head_dim, device=device)
    kv.write(kv.plan_append(2, [first], [BLOCK_SIZE]), 2, third, third)
    second = list(first)
    kv.incref_blocks(second)
    kept_keys = [kv.gather_sequence(2, each)[0][:, :1] for each in (block_list, first)]
    reused_block, copies = other_list[0], []
    copy_shared_blocks = kv._append_executor.copy_shared_blocks

    def recorded_copy(plan: AppendPlan) -> None:
        copies.append((plan.copy_from, plan.copy_to))
        copy_shared_blocks(plan)

    monkeypatch.setattr(kv._append_executor, "copy_shared_blocks", recorded_copy)
    kv.truncate_batch(2, [block_list, other_list, first], [1, 0, 1])
    assert first == [reused_block]
    assert len(copies) == 2
    assert not any(set(read) & set(written) for read, written in copies)
    for expected, block_ids in zip(kept_keys, (block_list, first), strict=True):
        assert torch.equal(expected, kv.gather_sequence(2, block_ids)[0])


def test_truncate_batch_without_enough_blocks_changes_nothing(device: str) -> None:
    kv, lists = build_shared(device, BLOCK_SIZE, 3, blocks=3)
    before = Metadata.of(kv)
    before_state = [list(block_ids) for block_ids in lists]
    with pytest.raises(OutOfBlocks, match="layer 2 has 1 free blocks and 2 are needed"):
        kv.truncate_batch(2, lists, [1, 2, 4])
    metadata = Metadata.of(kv)
    assert (lists, metadata) == (before_state, before)


REJECTED_CALLS = {
    "too few lengths": RejectedCall(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.partial, scene.full], [1]),
        BadArgument,
        "1 lengths for 2 block lists",
    ),
    "second length too large": RejectedCall(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, scene.partial], [1, 3]),
        BadArgument,
        "truncate to 3, but 2 tokens are stored",
    ),
    "same list twice": RejectedCall(
        lambda scene: (
            scene.kv.truncate_batch,
            0,
            [scene.shared, scene.shared],
            [1, 1],
        ),
        BadArgument,
        "the same list object is given twice",
    ),
    "two lists on a block with one reference": RejectedCall(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, list(scene.full)], [1, 0]),
        BadRefcount,
        "is in 2 of the lists and held 1 times: incref_blocks was not called",
    ),
    "tuple": RejectedCall(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, tuple(scene.partial)], [1, 0]),
        BadArgument,
        "a block list must be a list, not",
    ),
}


@pytest.mark.parametrize("case", REJECTED_CALLS.values(), ids=REJECTED_CALLS)
def test_rejected_call_changes_nothing(device: str, case: RejectedCall) -> None:
    assert_rejected(build_scene(device, AppendPolicy()), case)


def test_last_holder_in_a_batch_needs_no_block_for_a_copy(device: str) -> None:
    kv, lists = build_shared(device, BLOCK_SIZE - 1, 2, blocks=3)
    assert kv.num_free_blocks(2) == 1
    kv.truncate_batch(2, lists, [1, 1])
    assert kv.num_free_blocks(2) == 0
    assert {block for (block,) in lists} == {1 + kv.first_id(2), 2 + kv.first_id(2)}
