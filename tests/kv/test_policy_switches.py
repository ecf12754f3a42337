"""All combinations of the policy's switches: the same bits and block ids."""

from __future__ import annotations

from itertools import product

import pytest

from roseinfer import AppendPolicy, Path
from roseinfer.paths import GATHER_PATHS
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
    counts = twins.append([0, 1])
    twins.fork(0)
    counts += twins.append([0, 1, 2])
    while len(twins.fast_lists[1]) == 1:
        counts += twins.append([2, 1])
    twins.fork(1)
    twins.free(0)
    counts += twins.append([3, 0, 1])
    counts += twins.append([1, 3])
    return counts


def name_of(policy: AppendPolicy) -> str:
    return "-".join(name for name in SWITCHES if not getattr(policy, name)) or "all_on"


@pytest.mark.sampled_cases
@pytest.mark.parametrize("policy", COMBINATIONS, ids=name_of)
def test_every_combination_matches_append_token(device: str, policy: AppendPolicy) -> None:
    twins = Twins(device, policy, lengths=(0, 0))
    counts = short_history(twins)
    twins.check()
    assert not forbidden_paths_taken(policy, counts)


def forbidden_paths_taken(policy: AppendPolicy, counts: Counts) -> set[Path]:
    """Return the paths that ran although a switch forbids them."""
    forbidden: set[Path] = set()
    if not policy.batched:
        forbidden |= set(Path) - {Path.PER_TOKEN}
    if not policy.batched_copy_on_write:
        forbidden |= CLONES
    if not policy.identity:
        forbidden |= WRITES - GATHER_PATHS
    if not policy.scalar_position:
        forbidden |= {Path.TRITON_FULL_BATCH, Path.TORCH_SCALAR}
    if not policy.triton:
        forbidden |= {path for path in Path if path.needs_triton}
    if policy.batched and policy.batched_rollover and policy.batched_copy_on_write:
        forbidden.add(Path.PER_TOKEN)
    return forbidden & {path for path in Path if counts[path]}


def test_history_has_full_and_partial_blocks(device: str) -> None:
    """The history by which the combinations are compared is not trivial."""
    twins = Twins(device, lengths=(0, 0))
    counts = short_history(twins)
    lengths = [twins.fast.block_info(ids[-1]).length for ids in twins.fast_lists]
    assert BLOCK_SIZE not in lengths
    assert len(twins.fast_lists[1]) == 2
    assert {Path.TRITON_FULL_BATCH, Path.TRITON_IDENTITY_POS, Path.CLONE_TRITON} <= set(counts)


def test_policy_may_change_between_calls(device: str) -> None:
    """One cache uses all policies, one step each, and so all its write paths."""
    twins = Twins(device, lengths=(2, 2, 2), max_blocks_per_layer=64)
    counts = Counts()
    for policy in COMBINATIONS:
        twins.fast.policy = policy
        counts += twins.append()
    assert {path for path in Path if counts[path]} == set(Path) - CLONES
    twins.check()
