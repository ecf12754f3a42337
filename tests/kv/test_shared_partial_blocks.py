"""Several sequences that share a partial block, some or all of them in one batch.

All holders except the last must copy, the last may write in place, and no copy may contain a token
that another row of the same batch wrote.
"""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from roseinfer import AppendPolicy, Condition, Path
from tests.kv.twins import BLOCK_SIZE, Twins

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "one_by_one": AppendPolicy(batched_copy_on_write=False, triton=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def build_shared(device: str, policy: AppendPolicy, holders: int) -> Twins:
    twins = Twins(device, policy, lengths=(2,))
    for _ in range(holders - 1):
        twins.fork(0)
    return twins


@all_policies
@pytest.mark.parametrize(
    "rows", [rows for size in (1, 2, 3) for rows in permutations(range(3), size)]
)
def test_three_holders_in_any_order(
    device: str, policy: AppendPolicy, rows: tuple[int, ...]
) -> None:
    twins = build_shared(device, policy, holders=3)
    counts = twins.append(rows)
    assert counts[Condition.COPY_ON_WRITE] == min(len(rows), 2)
    assert counts[Condition.IN_PLACE] == (len(rows) == 3)
    twins.check()


@all_policies
@pytest.mark.parametrize("rows", [(0,), (1,), (0, 1), (1, 0)])
def test_two_holders_in_any_order(device: str, policy: AppendPolicy, rows: tuple[int, ...]) -> None:
    twins = build_shared(device, policy, holders=2)
    counts = twins.append(rows)
    assert counts[Condition.COPY_ON_WRITE] == 1
    assert counts[Condition.IN_PLACE] == len(rows) - 1
    twins.check()


@all_policies
@pytest.mark.parametrize("rows", list(combinations(range(5), 4)))
def test_two_families_in_one_batch(
    device: str, policy: AppendPolicy, rows: tuple[int, ...]
) -> None:
    """Rows 0, 2, 4 share one block and rows 1, 3 another; one sequence is not in the batch."""
    twins = Twins(device, policy, lengths=(2, 3))
    for row in (0, 1, 0):
        twins.fork(row)
    assert twins.append(rows)[Condition.COPY_ON_WRITE] >= 2
    twins.check()


@all_policies
def test_partial_block_after_shared_full_blocks_is_copied(
    device: str, policy: AppendPolicy
) -> None:
    """Only the partial block is copied; the full ones before it stay shared."""
    twins = Twins(device, policy, lengths=(2 * BLOCK_SIZE + 1,))
    twins.fork(0)
    assert twins.append()[Condition.COPY_ON_WRITE] == 1
    first, second = twins.fast_lists
    assert first[:2] == second[:2]
    assert [twins.fast.refcount(block) for block in first] == [2, 2, 1]
    twins.check()


@pytest.mark.parametrize(
    ("policy", "path"),
    [(AppendPolicy(), Path.CLONE_TRITON), (AppendPolicy(triton=False), Path.CLONE_TORCH)],
)
def test_copies_of_a_batch_are_one_clone(device: str, policy: AppendPolicy, path: Path) -> None:
    twins = build_shared(device, policy, holders=4)
    counts = twins.append()
    assert counts[Condition.COPY_ON_WRITE] == 3
    assert counts[path] == 1
    twins.check()


@all_policies
def test_copy_may_use_a_recycled_block(device: str, policy: AppendPolicy) -> None:
    twins = build_shared(device, policy, holders=2)
    used = twins.start(BLOCK_SIZE)
    recycled = twins.fast_lists[used][0]
    twins.free(used)
    twins.append([0, 1])
    assert twins.fast_lists[0] == [recycled]
    twins.check()
