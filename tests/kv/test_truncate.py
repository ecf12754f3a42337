"""Truncating lists with shared blocks, and many lists at once: all of them, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, BadRefcount, KVBlockManager, OutOfBlocks
from tests.kv.grouped import facts
from tests.kv.scene import POLICIES, Refused, assert_refused, set_up
from tests.kv.twins import BLOCK_SIZE, Metadata, bits, build

if TYPE_CHECKING:
    from roseinfer.kv.plan import AppendPlan

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def shared(
    device: str, length: int, holders: int, policy: AppendPolicy | None = None, *, blocks: int = 16
) -> tuple[KVBlockManager, list[list[int]]]:
    """Make a cache whose four layers share lists in pairs, and lists with the same blocks."""
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


@every_policy
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE + 1])
def test_a_shared_block_that_is_cut_is_copied(
    device: str, policy: AppendPolicy, length: int
) -> None:
    """The other list and its blocks do not change; kept tokens read back the same."""
    kv, (mine, yours) = shared(device, 2 * BLOCK_SIZE, 2, policy)
    was, tokens = facts(kv, yours), [kv.gather_sequence(layer, yours) for layer in (2, 3)]
    kv.truncate(2, mine, length)
    kept = -(-length // BLOCK_SIZE)
    assert mine[: kept - 1] == yours[: kept - 1]
    assert mine[-1] not in yours
    assert facts(kv, mine)[-1][1:] == ((kept - 1) * BLOCK_SIZE, length % BLOCK_SIZE, 1)
    assert [fact[:3] for fact in facts(kv, yours)] == [fact[:3] for fact in was]
    assert [kv.refcount(block) for block in yours] == [1 + (at < kept - 1) for at in range(2)]
    for layer, whole in zip((2, 3), tokens, strict=True):
        for kind, now, cut in zip(
            whole,
            kv.gather_sequence(layer, yours),
            kv.gather_sequence(layer, mine),
            strict=True,
        ):
            assert torch.equal(bits(kind), bits(now))
            assert torch.equal(bits(kind[:, :length]), bits(cut))
    assert kv.plan_append(2, [mine]).positions == [length % BLOCK_SIZE]


def test_the_last_list_to_be_cut_keeps_the_block(device: str) -> None:
    kv, lists = shared(device, BLOCK_SIZE, 3)
    block, free = lists[0][0], kv.num_free_blocks(2)
    kv.truncate_batch(2, lists, [1, 2, 3])
    assert [block_ids == [block] for block_ids in lists] == [False, False, True]
    assert [facts(kv, block_ids)[0][1:] for block_ids in lists] == [(0, n, 1) for n in (1, 2, 3)]
    assert kv.num_free_blocks(2) == free - 2


def test_what_a_list_gives_back_makes_room_for_its_copy(device: str) -> None:
    kv, (mine, yours) = shared(device, BLOCK_SIZE, 2, blocks=3)
    kv.reserve(2, [mine], [1])
    assert kv.num_free_blocks(2) == 0
    given_back = mine[-1]
    kv.truncate(2, mine, 1)
    assert mine == [given_back]
    assert facts(kv, yours) == [(*facts(kv, yours)[0][:2], BLOCK_SIZE, 1)]


@every_policy
def test_no_copy_writes_to_a_block_that_another_reads(
    device: str, policy: AppendPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block copied by one list and freed by the next is reused for the third's copy."""
    kv, (mine, yours) = shared(device, BLOCK_SIZE, 2, policy, blocks=5)
    first: list[int] = []
    third = torch.rand(BLOCK_SIZE, kv.num_heads, kv.head_dim, device=device)
    kv.write(kv.plan_append(2, [first], [BLOCK_SIZE]), 2, third, third)
    second = list(first)
    kv.incref_blocks(second)
    kept = [kv.gather_sequence(2, each)[0][:, :1] for each in (mine, first)]
    again, copies = yours[0], []
    copy_shared_blocks = kv._append_executor.copy_shared_blocks

    def noted(plan: AppendPlan) -> None:
        copies.append((plan.copy_from, plan.copy_to))
        copy_shared_blocks(plan)

    monkeypatch.setattr(kv._append_executor, "copy_shared_blocks", noted)
    kv.truncate_batch(2, [mine, yours, first], [1, 0, 1])
    assert first == [again]
    assert len(copies) == 2
    assert not any(set(read) & set(written) for read, written in copies)
    for was, block_ids in zip(kept, (mine, first), strict=True):
        assert torch.equal(was, kv.gather_sequence(2, block_ids)[0])


def test_a_list_that_finds_no_block_leaves_all_as_they_were(device: str) -> None:
    kv, lists = shared(device, BLOCK_SIZE, 3, blocks=3)
    before = Metadata.of(kv)
    was = [list(block_ids) for block_ids in lists]
    with pytest.raises(OutOfBlocks, match="layer 2 has 1 free blocks and 2 are needed"):
        kv.truncate_batch(2, lists, [1, 2, 4])
    kv_books = Metadata.of(kv)
    assert (lists, kv_books) == (was, before)


REFUSED = {
    "too few lengths": Refused(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.partial, scene.full], [1]),
        BadArgument,
        "1 lengths for 2 block lists",
    ),
    "the second is longer than it is": Refused(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, scene.partial], [1, 3]),
        BadArgument,
        "truncate to 3, but 2 tokens are stored",
    ),
    "a list twice": Refused(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.shared, scene.shared], [1, 1]),
        BadArgument,
        "the same list object is given twice",
    ),
    "a block that is held once, twice": Refused(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, list(scene.full)], [1, 0]),
        BadRefcount,
        "is in 2 of the lists and held 1 times: incref_blocks was not called",
    ),
    "no list": Refused(
        lambda scene: (scene.kv.truncate_batch, 0, [scene.full, tuple(scene.partial)], [1, 0]),
        BadArgument,
        "a block list must be a list, not",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_call_that_is_refused_changes_nothing(device: str, case: Refused) -> None:
    assert_refused(set_up(device, AppendPolicy()), case)
