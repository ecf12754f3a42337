"""Lists that share a full block: each gets a new block, and nothing is copied."""

from __future__ import annotations

import pytest
import torch

from roseinfer import AppendPolicy, Condition, Path
from tests.kv.recording import Operations
from tests.kv.twins import BLOCK_SIZE, Twins, assert_same_bits, bits

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "gather": AppendPolicy(identity=False),
    "rollover_apart": AppendPolicy(batched_rollover=False),
    "per_token": AppendPolicy(batched=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def two_lists_on_one_full_block(device: str, policy: AppendPolicy) -> Twins:
    twins = Twins(device, policy, lengths=(BLOCK_SIZE,))
    twins.fork(0)
    assert twins.fast.refcount(twins.fast_lists[0][0]) == 2
    return twins


@all_policies
def test_each_list_gets_a_new_block_and_the_full_one_stays_shared(
    device: str, policy: AppendPolicy
) -> None:
    twins = two_lists_on_one_full_block(device, policy)
    (full,) = twins.fast_lists[0]
    counts = twins.append()
    (first, new_of_first), (second, new_of_second) = twins.fast_lists
    assert first == second == full
    assert len({full, new_of_first, new_of_second}) == 3
    assert [twins.fast.refcount(b) for b in (full, new_of_first, new_of_second)] == [2, 1, 1]
    assert counts[Condition.ROLLOVER_SHARED] == 2
    twins.check()


@all_policies
def test_only_position_0_of_the_new_block_changes(device: str, policy: AppendPolicy) -> None:
    """A copied block would contain the full block's other positions."""
    twins = two_lists_on_one_full_block(device, policy)
    key, value = twins.token(2), twins.token(2)
    expected_keys, expected_values = twins.fast.keys.clone(), twins.fast.values.clone()
    twins.append([0, 1], key, value)
    for row in (0, 1):
        block = twins.fast_lists[row][-1] % twins.fast.max_blocks_per_layer
        expected_keys[twins.layer, block, :, 0] = key[row]
        expected_values[twins.layer, block, :, 0] = value[row]
        assert twins.fast.block_info(twins.fast_lists[row][-1]).length == 1
    assert_same_bits(twins.fast.keys, expected_keys, "keys")
    assert_same_bits(twins.fast.values, expected_values, "values")


@pytest.mark.parametrize(
    ("policy", "write"),
    [(AppendPolicy(), Path.TRITON_FULL_BATCH), (AppendPolicy(triton=False), Path.TORCH_SCALAR)],
    ids=["triton", "torch"],
)
def test_no_copy_is_counted_dispatched_or_launched(
    device: str, monkeypatch: pytest.MonkeyPatch, policy: AppendPolicy, write: Path
) -> None:
    twins = two_lists_on_one_full_block(device, policy)
    key, value = twins.token(2), twins.token(2)
    operations = Operations(monkeypatch)
    with operations:
        counts = twins.fast.path_counts.copy()
        twins.fast.append_token_batch(twins.layer, twins.fast_lists, key, value)
    assert twins.fast.path_counts - counts == {write: 1, Condition.ROLLOVER_SHARED: 2}
    assert operations.count("index_select") == 0
    assert len(operations.launches) + operations.count("index_copy_") // 2 == 1


@pytest.mark.parametrize("policy", [AppendPolicy(), AppendPolicy(triton=False)])
def test_partial_block_is_copied(
    device: str, monkeypatch: pytest.MonkeyPatch, policy: AppendPolicy
) -> None:
    """The same steps on a partial block do dispatch or launch a copy."""
    twins = Twins(device, policy, lengths=(BLOCK_SIZE - 1,))
    twins.fork(0)
    key, value = twins.token(2), twins.token(2)
    operations = Operations(monkeypatch)
    with operations:
        twins.fast.append_token_batch(twins.layer, twins.fast_lists, key, value)
    assert len(operations.launches) + operations.count("index_copy_") // 2 == 2


@all_policies
def test_later_tokens_of_one_list_do_not_change_the_other(
    device: str, policy: AppendPolicy
) -> None:
    twins = two_lists_on_one_full_block(device, policy)
    twins.append()
    before = [bits(t) for t in twins.fast.gather_sequence(twins.layer, twins.fast_lists[1])]
    for _ in range(BLOCK_SIZE):
        twins.append([0])
    after = [bits(t) for t in twins.fast.gather_sequence(twins.layer, twins.fast_lists[1])]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    twins.check()
