"""A batch whose rows meet every condition, under every policy that splits it."""

from __future__ import annotations

from itertools import permutations

import pytest

from roseinfer import AppendPolicy, Condition, Path
from tests.kv.twins import BLOCK_SIZE, Counts, Twins

ROWS = {
    Condition.FRESH: 1,
    Condition.IN_PLACE: 2,
    Condition.ROLLOVER: 1,
    Condition.ROLLOVER_SHARED: 1,
    Condition.COPY_ON_WRITE: 1,
}


def mixed(device: str, policy: AppendPolicy) -> Twins:
    """Build six rows: fresh, in place, full, full and shared, partial and shared, in place."""
    twins = Twins(device, policy, lengths=(0, 2, BLOCK_SIZE, BLOCK_SIZE, 2, 3))
    twins.fork(3)
    twins.fork(4)
    return twins


def append_mixed(twins: Twins) -> Counts:
    return twins.append(range(6))


ROUTES: dict[str, tuple[AppendPolicy, dict[Path, int]]] = {
    "all_triton": (
        AppendPolicy(),
        {Path.TRITON_IDENTITY_POS: 1, Path.CLONE_TRITON: 1},
    ),
    "all_torch": (
        AppendPolicy(triton=False),
        {Path.TORCH_VECTOR: 1, Path.CLONE_TORCH: 1},
    ),
    "gather_triton": (
        AppendPolicy(identity=False),
        {Path.TRITON_GATHER: 1, Path.CLONE_TRITON: 1},
    ),
    "gather_torch": (
        AppendPolicy(identity=False, triton=False),
        {Path.TORCH_GATHER: 1, Path.CLONE_TORCH: 1},
    ),
    "copy_on_write_apart_triton": (
        AppendPolicy(batched_copy_on_write=False),
        {Path.TRITON_GATHER: 1, Path.PER_TOKEN: 1},
    ),
    "copy_on_write_apart_torch": (
        AppendPolicy(batched_copy_on_write=False, triton=False),
        {Path.TORCH_GATHER: 1, Path.PER_TOKEN: 1},
    ),
    "rollover_apart_triton": (
        AppendPolicy(batched_rollover=False),
        {Path.TRITON_GATHER: 1, Path.CLONE_TRITON: 1, Path.PER_TOKEN: 3},
    ),
    "rollover_apart_torch": (
        AppendPolicy(batched_rollover=False, triton=False),
        {Path.TORCH_GATHER: 1, Path.CLONE_TORCH: 1, Path.PER_TOKEN: 3},
    ),
    "both_apart": (
        AppendPolicy(batched_rollover=False, batched_copy_on_write=False),
        {Path.TRITON_GATHER: 1, Path.PER_TOKEN: 4},
    ),
    "all_apart": (
        AppendPolicy(batched=False),
        {Path.PER_TOKEN: 6},
    ),
}


@pytest.mark.parametrize(("policy", "paths"), ROUTES.values(), ids=ROUTES)
def test_every_condition_in_one_batch(
    device: str, policy: AppendPolicy, paths: dict[Path, int]
) -> None:
    twins = mixed(device, policy)
    counts = append_mixed(twins)
    assert {condition: counts[condition] for condition in Condition if counts[condition]} == ROWS
    assert {path: counts[path] for path in Path if counts[path]} == paths
    twins.check()


@pytest.mark.parametrize("policy", [policy for policy, _ in ROUTES.values()], ids=ROUTES)
def test_steps_after_a_mixed_batch(device: str, policy: AppendPolicy) -> None:
    """All eight sequences continue, including the other holders of shared blocks."""
    twins = mixed(device, policy)
    append_mixed(twins)
    total = sum((twins.append() for _ in range(BLOCK_SIZE + 1)), Counts())
    assert total[Condition.ROLLOVER_SHARED] == 1
    twins.check()


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "policy",
    [
        AppendPolicy(triton=False),
        AppendPolicy(triton=False, batched_rollover=False),
        AppendPolicy(triton=False, batched_copy_on_write=False),
    ],
    ids=["batched", "rollover_apart", "copy_on_write_apart"],
)
@pytest.mark.parametrize("order", list(permutations(range(1, 5))))
def test_blocks_are_allocated_in_row_order(
    device: str, policy: AppendPolicy, order: tuple[int, ...]
) -> None:
    """Blocks are allocated in row order, whichever rows go through ``append_token``."""
    twins = mixed(device, policy)
    counts = twins.append(order)
    assert counts[Condition.ROLLOVER] == counts[Condition.COPY_ON_WRITE] == 1
    twins.check()


@pytest.mark.parametrize("policy", [AppendPolicy(batched_rollover=False), AppendPolicy()])
def test_batch_of_new_sequences_only(device: str, policy: AppendPolicy) -> None:
    """If rollover is not batched, the batch has no rows left and writes nothing."""
    twins = Twins(device, policy, lengths=(0, 0, 0))
    counts = twins.append()
    write = (Path.TRITON_FULL_BATCH, 1) if policy.batched_rollover else (Path.PER_TOKEN, 3)
    assert counts == dict([(Condition.FRESH, 3), write])
    twins.check()
