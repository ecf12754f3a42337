"""All combinations of the policy's switches give the same bits and block ids."""

from __future__ import annotations

from itertools import product

import pytest

from roseinfer import AppendPolicy, Path
from tests.kv.twins import BLOCK_SIZE, Counts, Twins

SWITCHES = (
    "batched",
    "batched_rollover",
    "batched_copy_on_write",
    "identity",
    "scalar_position",
    "triton",
)
CLONES = {Path.CLONE_TRITON, Path.CLONE_TORCH}
WRITES = set(Path) - CLONES - {Path.PER_TOKEN}
COMBINATIONS = [
    AppendPolicy(**dict(zip(SWITCHES, values, strict=True)))
    for values in product([True, False], repeat=len(SWITCHES))
]


def short_history(twins: Twins) -> Counts:
    """Run fresh rows, a shared partial block, shared full blocks, a freed and reused one."""
    reached = twins.append([0, 1])
    twins.fork(0)
    reached += twins.append([0, 1, 2])
    while len(twins.fast_lists[1]) == 1:
        reached += twins.append([2, 1])
    twins.fork(1)
    twins.free(0)
    reached += twins.append([3, 0, 1])
    reached += twins.append([1, 3])
    return reached


def name_of(policy: AppendPolicy) -> str:
    return "-".join(name for name in SWITCHES if not getattr(policy, name)) or "all_on"


@pytest.mark.parametrize("policy", COMBINATIONS, ids=name_of)
def test_every_combination_ends_where_append_token_ends(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, lengths=(0, 0))
    reached = short_history(twins)
    twins.check()
    assert not reached_although_off(policy, reached)


def reached_although_off(policy: AppendPolicy, reached: Counts) -> set[Path]:
    """Return the paths that ran although a switch forbids them."""
    forbidden: set[Path] = set()
    if not policy.batched:
        forbidden |= set(Path) - {Path.PER_TOKEN}
    if not policy.batched_copy_on_write:
        forbidden |= CLONES
    if not policy.identity:
        forbidden |= {path for path in WRITES if not path.needs_rows}
    if not policy.scalar_position:
        forbidden |= {Path.TRITON_FULL_BATCH, Path.TORCH_SCALAR}
    if not policy.triton:
        forbidden |= {path for path in Path if path.needs_triton}
    if policy.batched and policy.batched_rollover and policy.batched_copy_on_write:
        forbidden.add(Path.PER_TOKEN)
    return forbidden & {path for path in Path if reached[path]}


def test_the_history_fills_blocks_and_leaves_partial_ones(device: str) -> None:
    """The history by which the combinations are compared is not trivial."""
    twins = Twins(device, lengths=(0, 0))
    reached = short_history(twins)
    lengths = [twins.fast.block_info(ids[-1]).length for ids in twins.fast_lists]
    assert BLOCK_SIZE not in lengths
    assert len(twins.fast_lists[1]) == 2
    assert {Path.TRITON_FULL_BATCH, Path.TRITON_IDENTITY_POS, Path.CLONE_TRITON} <= set(reached)


def test_the_policy_may_change_between_calls(device: str) -> None:
    """One cache uses all policies, one step each, and so all its write paths."""
    twins = Twins(device, lengths=(2, 2, 2), max_blocks_per_layer=64)
    reached = Counts()
    for policy in COMBINATIONS:
        twins.fast.policy = policy
        reached += twins.append()
    assert {path for path in Path if reached[path]} == set(Path) - CLONES
    twins.check()
