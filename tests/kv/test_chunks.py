"""Plans of several tokens per sequence, for chunked prefill and for reserving ahead."""

from __future__ import annotations

from itertools import permutations

import pytest

from roseinfer import AppendPolicy, BadArgument, Condition, OutOfBlocks, Path
from tests.kv.grouped import GROUP, GroupTwins
from tests.kv.twins import BLOCK_SIZE, Snapshot

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "gather_torch": AppendPolicy(identity=False, triton=False),
    "copies_one_by_one": AppendPolicy(batched_copy_on_write=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.mark.sampled_cases
@all_policies
@pytest.mark.parametrize("start", range(BLOCK_SIZE + 1))
@pytest.mark.parametrize("count", [1, 3, BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_chunk_starts_at_any_position(
    device: str, policy: AppendPolicy, start: int, count: int
) -> None:
    twins = GroupTwins(device, policy, lengths=(start,))
    twins.append([0], [count])
    stored = sum(twins.fast.block_info(block).length for block in twins.lists[0])
    assert stored == start + count
    twins.check()


@all_policies
def test_chunks_of_several_sequences_in_one_plan(device: str, policy: AppendPolicy) -> None:
    twins = GroupTwins(device, policy, lengths=(0, 2, BLOCK_SIZE, 3))
    twins.append([3, 0, 2, 1], [6, 1, BLOCK_SIZE, 2])
    twins.append([1, 2, 3], [3, 1, 5])
    twins.check()


@all_policies
@pytest.mark.parametrize("rows", [[0], [1], [0, 1], [1, 0], [2, 1, 0]])
def test_chunk_on_a_shared_block_copies_it_once(
    device: str, policy: AppendPolicy, rows: list[int]
) -> None:
    twins = GroupTwins(device, policy, lengths=(2,))
    twins.fork(0)
    twins.fork(0)
    before = twins.fast.path_counts.copy()
    plan = twins.append(rows, [2 * BLOCK_SIZE] * len(rows))
    counts = twins.fast.path_counts - before
    assert counts[Condition.COPY_ON_WRITE] == len(plan.copy_to) == min(len(rows), 2)
    assert counts[Path.CLONE_TRITON] + counts[Path.CLONE_TORCH] == policy.batched_copy_on_write
    twins.check()


@all_policies
def test_chunk_after_a_shared_full_block_copies_nothing(device: str, policy: AppendPolicy) -> None:
    twins = GroupTwins(device, policy, lengths=(BLOCK_SIZE,))
    twins.fork(0)
    plan = twins.append([0, 1], [5, 2])
    assert not plan.copy_to
    assert twins.lists[0][0] == twins.lists[1][0]
    twins.check()


@all_policies
def test_decode_step_after_chunks(device: str, policy: AppendPolicy) -> None:
    twins = GroupTwins(device, policy, lengths=(5, 6))
    plan = twins.append([0, 1])
    assert plan.num_tokens == 2
    twins.check()


def test_one_token_chunks_take_the_path_of_a_decode_step(device: str) -> None:
    twins = GroupTwins(device, lengths=(2, 2))
    assert twins.append([0, 1], [1, 1]).path is Path.TRITON_FULL_BATCH
    twins.check()


def test_chunk_is_one_write_per_layer(device: str) -> None:
    twins = GroupTwins(device)
    twins.start()
    before = twins.fast.path_counts.copy()
    twins.append([0], [3 * BLOCK_SIZE])
    counts = twins.fast.path_counts - before
    assert counts == {Path.TRITON_IDENTITY_POS: GROUP, Condition.FRESH: 1}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_chunks_that_do_not_fit_allocate_nothing(device: str, order: tuple[int, ...]) -> None:
    """One chunk fits into its last block, one needs three new blocks and one needs one."""
    twins = GroupTwins(device, lengths=(1,))
    num_filled = (twins.fast.num_free_blocks(2) - 3) * BLOCK_SIZE
    twins.append([twins.start()], [num_filled])
    rows: list[tuple[list[int], int]] = [
        (twins.lists[0], BLOCK_SIZE - 1),
        ([], 2 * BLOCK_SIZE + 1),
        ([], BLOCK_SIZE),
    ]
    lists = [rows[row][0] for row in order]
    copies = [list(ids) for ids in lists]
    before = Snapshot.of(twins.fast)
    with pytest.raises(OutOfBlocks, match="3 free blocks and 4 are needed") as caught:
        twins.fast.plan_append(2, lists, [rows[row][1] for row in order])
    assert (caught.value.needed, caught.value.free) == (4, 3)
    before.assert_unchanged(twins.fast)
    assert lists == copies


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1], "1 token counts for 2 block lists"),
        ([1, 2, 3], "3 token counts for 2 block lists"),
        ([1, 0], "row 1: cannot append 0 tokens"),
        ([-2, 1], "row 0: cannot append -2 tokens"),
    ],
)
def test_invalid_token_counts_are_rejected(device: str, counts: list[int], words: str) -> None:
    twins = GroupTwins(device, lengths=(1, 2))
    before = Snapshot.of(twins.fast)
    lists = [list(ids) for ids in twins.lists]
    with pytest.raises(BadArgument, match=words):
        twins.plan([0, 1], counts)
    before.assert_unchanged(twins.fast)
    assert twins.lists == lists
