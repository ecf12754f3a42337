"""Layer groups: one plan per step, one write per layer."""

from __future__ import annotations

import pytest
import torch

from roseinfer import AppendPolicy, BadArgument, Condition, Path
from tests.kv.grouped import GROUP, LAYERS, GroupTwins
from tests.kv.twins import BLOCK_SIZE, DTYPES, Snapshot, build

POLICIES = {
    "triton": AppendPolicy(),
    "torch": AppendPolicy(triton=False),
    "copies_one_by_one": AppendPolicy(batched_copy_on_write=False),
    "gather": AppendPolicy(identity=False),
    "no_scalar": AppendPolicy(scalar_position=False, triton=False),
    "not_batched": AppendPolicy(batched=False, batched_rollover=False),
}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@all_policies
@pytest.mark.parametrize("group", range(LAYERS // GROUP))
def test_one_token_per_sequence(device: str, policy: AppendPolicy, group: int) -> None:
    twins = GroupTwins(device, policy, group=group, lengths=(1, 2, 3))
    for _ in range(BLOCK_SIZE + 1):
        twins.append([0, 2, 1])
    twins.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("triton", [True, False])
def test_one_clone_copies_the_blocks_of_all_layers(
    device: str, dtype: torch.dtype, triton: bool
) -> None:
    twins = GroupTwins(device, AppendPolicy(triton=triton), dtype=dtype, lengths=(3, 2))
    twins.fork(0)
    twins.fork(0)
    before = twins.fast.path_counts.copy()
    twins.append([0, 1, 2, 3])
    counts = twins.fast.path_counts - before
    assert counts[Path.CLONE_TRITON if triton else Path.CLONE_TORCH] == 1
    assert counts[Condition.COPY_ON_WRITE] == 2
    assert counts[Path.TRITON_IDENTITY_POS if triton else Path.TORCH_VECTOR] == GROUP
    twins.check()


@all_policies
def test_every_condition_in_one_plan(device: str, policy: AppendPolicy) -> None:
    twins = GroupTwins(device, policy, lengths=(0, 2, BLOCK_SIZE, BLOCK_SIZE, 2))
    twins.fork(3)
    twins.fork(4)
    before = twins.fast.path_counts.copy()
    plan = twins.append(range(5))
    counts = twins.fast.path_counts - before
    assert counts[plan.path] == GROUP
    assert {name: counts[name] for name in Condition if counts[name]} == {
        Condition.FRESH: 1,
        Condition.IN_PLACE: 1,
        Condition.ROLLOVER: 1,
        Condition.ROLLOVER_SHARED: 1,
        Condition.COPY_ON_WRITE: 1,
    }
    twins.check()


@all_policies
def test_layers_may_be_written_in_any_order_and_later(device: str, policy: AppendPolicy) -> None:
    """The next plan is made before the last layer of this one is written."""
    twins = GroupTwins(device, policy, lengths=(1, 2))
    plans = [twins.plan([0, 1]) for _ in range(3)]
    data = [{layer: (twins.tokens(2), twins.tokens(2)) for layer in twins.layers} for _ in plans]
    for layer in reversed(twins.layers):
        for plan, tokens in zip(plans, data, strict=True):
            twins.fast.write(plan, layer, *tokens[layer])
            twins.append_per_token(layer, [0, 1], [1, 1], *tokens[layer])
    twins.check()


def test_groups_do_not_share_ids_or_blocks(device: str) -> None:
    kv = build(device, num_layers=LAYERS, layers_per_group=GROUP)
    low: list[int] = []
    high: list[int] = []
    kv.plan_append(0, [low])
    kv.plan_append(3, [high])
    assert (low, high) == ([1], [kv.max_blocks_per_layer + 1])
    assert kv.block_info(high[0]).layer == GROUP
    assert kv.num_free_blocks(2) == kv.num_free_blocks(3) == kv.max_blocks_per_layer - 2


@pytest.mark.parametrize("layer", [0, 1])
def test_plan_is_rejected_by_layers_of_another_group(device: str, layer: int) -> None:
    twins = GroupTwins(device, group=1, lengths=(1,))
    plan = twins.plan([0])
    before = Snapshot.of(twins.fast)
    with pytest.raises(BadArgument, match=f"the plan is for layers 2, 3; layer {layer}"):
        twins.fast.write(plan, layer, twins.tokens(1), twins.tokens(1))
    before.assert_unchanged(twins.fast)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_write_of_another_number_of_tokens_is_rejected(device: str, tokens: int) -> None:
    twins = GroupTwins(device, lengths=(1, 2))
    plan = twins.plan([0, 1])
    before = Snapshot.of(twins.fast)
    with pytest.raises(BadArgument, match=r"must be \[2, 3, 5\]"):
        twins.fast.write(plan, 2, twins.tokens(tokens), twins.tokens(tokens))
    before.assert_unchanged(twins.fast)


def test_single_layer_calls_are_rejected_in_a_group(device: str) -> None:
    twins = GroupTwins(device, lengths=(1,))
    key = twins.tokens(1)
    before = Snapshot.of(twins.fast)
    words = r"2 layers share a block list \(layers_per_group, windows\); use plan_append"
    rejected = pytest.raises(BadArgument, match=words)
    with rejected:
        twins.fast.append_token(2, twins.lists[0], key[0], key[0])
    with rejected:
        twins.fast.append_token_batch(2, twins.lists, key, key)
    with rejected:
        twins.fast.register_prefill_layer(2, key[None].transpose(1, 2), key[None].transpose(1, 2))
    before.assert_unchanged(twins.fast)


def test_empty_plan_writes_nothing(device: str) -> None:
    twins = GroupTwins(device, lengths=(1,))
    before = Snapshot.of(twins.fast)
    plan = twins.plan([])
    twins.fast.write(plan, 2, twins.tokens(0), twins.tokens(0))
    before.assert_unchanged(twins.fast)


@pytest.mark.parametrize("triton", [True, False])
def test_plan_of_a_single_layer_group(device: str, triton: bool) -> None:
    """One layer per group, the default, is a special case."""
    kv = build(device, AppendPolicy(triton=triton))
    twin = build(device, AppendPolicy(triton=False))
    key, value = kv.keys.new_ones(3, 3, 5), kv.keys.new_zeros(3, 3, 5)
    mine: list[int] = []
    theirs: list[int] = []
    kv.write(kv.plan_append(1, [mine], [3]), 1, key, value)
    for token in range(3):
        twin.append_token(1, theirs, key[token], value[token])
    assert mine == theirs
    assert torch.equal(kv.keys.view(torch.int32), twin.keys.view(torch.int32))
    assert torch.equal(kv.values.view(torch.int32), twin.values.view(torch.int32))
