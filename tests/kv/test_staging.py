"""Reused index buffers: no plan that may still be written reads the indices of another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from roseinfer import AppendPolicy, KVBlockManager, StalePlan
from tests.kv.twins import Snapshot, build

RING = 64
cuda: Any = torch.cuda
"""``torch.cuda`` as Any, since parts of it are untyped."""
POLICIES = {"triton": AppendPolicy(), "torch": AppendPolicy(triton=False)}

all_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def numbered_tokens(kv: KVBlockManager, numbers: list[int]) -> torch.Tensor:
    """Return distinguishable tokens: every element of one is its number."""
    column = torch.tensor(numbers, dtype=kv.dtype).to(kv.device)
    return column[:, None, None].expand(-1, kv.num_heads, kv.head_dim)


def stored_numbers(kv: KVBlockManager, block_ids: list[int]) -> list[int]:
    """Return the numbers of a sequence's tokens; assert that values are their negatives."""
    keys, values = kv.gather_sequence(0, block_ids)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[:1, :, :1].expand_as(keys))
    numbers: list[int] = keys[0, :, 0].int().tolist()
    return numbers


class Steps:
    """Plans for one token per sequence; token ``number`` of row ``r`` is ``10 * number + r``."""

    def __init__(self, kv: KVBlockManager, starts: list[int]) -> None:
        self.kv = kv
        self.lists: list[list[int]] = [[] for _ in starts]
        self.expected: list[list[int]] = [[-1] * start for start in starts]
        self.number = 0
        for ids, start in zip(self.lists, starts, strict=True):
            if start:
                key = numbered_tokens(kv, [-1] * start)
                kv.write(kv.plan_append(0, [ids], [start]), 0, key, -key)

    def plan(self, rows: range | None = None) -> Step:
        rows = range(len(self.lists)) if rows is None else rows
        self.number += 1
        numbers = [10 * self.number + row for row in rows]
        for row, number in zip(rows, numbers, strict=True):
            self.expected[row].append(number)
        return Step(self.kv, [self.lists[row] for row in rows], numbers)

    def check(self) -> None:
        assert [stored_numbers(self.kv, ids) for ids in self.lists] == self.expected


class Step:
    def __init__(self, kv: KVBlockManager, lists: list[list[int]], numbers: list[int]) -> None:
        self.kv = kv
        self.plan = kv.plan_append(0, lists)
        self.key = numbered_tokens(kv, numbers)

    def write(self) -> None:
        self.kv.write(self.plan, 0, self.key, -self.key)


@all_policies
@pytest.mark.parametrize("order", [1, -1], ids=["in_order", "backwards"])
def test_full_ring_of_plans_is_written_correctly(
    device: str, policy: AppendPolicy, order: int
) -> None:
    """The most plans allowed are outstanding, all with columns of positions."""
    steps = Steps(build(device, policy, max_blocks_per_layer=64), starts=[0, 1, 3])
    plans = [steps.plan() for _ in range(RING)]
    for step in plans[::order]:
        step.write()
    steps.check()


@all_policies
def test_sliding_window_of_plans_is_written_correctly(device: str, policy: AppendPolicy) -> None:
    """Every plan is written only after half a ring of later ones was made."""
    steps = Steps(build(device, policy, max_blocks_per_layer=128), starts=[0, 1])
    waiting: list[Step] = []
    for _ in range(3 * RING):
        waiting.append(steps.plan())
        if len(waiting) > RING // 2:
            waiting.pop(0).write()
    for step in waiting:
        step.write()
    steps.check()


@all_policies
def test_plans_survive_the_growth_of_the_buffers(device: str, policy: AppendPolicy) -> None:
    """Small plans wait while a batch too large for the buffers replaces these twice."""
    kv = build(device, policy, max_blocks_per_layer=900, num_heads=1, head_dim=1)
    steps = Steps(kv, starts=[1, 2] + [0] * 600)
    small = [steps.plan(range(2)) for _ in range(5)]
    large = steps.plan(range(2, 302))
    small += [steps.plan(range(2)) for _ in range(5)]
    largest = steps.plan(range(602))
    for step in (largest, *small, large):
        step.write()
    steps.check()


@pytest.mark.parametrize("triton", [True, False])
def test_buffer_is_reused_with_other_columns(device: str, triton: bool) -> None:
    """In each round a buffer serves other batches and paths than in the previous one."""
    steps = Steps(build(device, max_blocks_per_layer=250), starts=[2, 2, 2, 3])
    dice = random.Random(1)
    for _ in range(4 * RING + 7):
        steps.kv.policy = AppendPolicy(
            triton=triton, identity=dice.random() < 0.7, scalar_position=dice.random() < 0.5
        )
        steps.plan(range(dice.choice([2, 2, 3, 4]))).write()
    steps.check()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("rows", [84, 85, 86, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_batches_around_the_size_of_the_buffers(device: str, rows: int, columns: int) -> None:
    """With one, two or three columns; a sequence outside the batch does not change."""
    policy = AppendPolicy(triton=False, identity=columns < 3, scalar_position=columns < 2)
    kv = build(device, policy, max_blocks_per_layer=2 * rows + 4, num_heads=1, head_dim=1)
    steps = Steps(kv, starts=[1] * (rows + 1))
    first, second = steps.plan(range(rows)), steps.plan(range(rows))
    assert first.plan.staged_indices is not None
    assert len(first.plan.staged_indices.columns) == columns
    second.write()
    first.write()
    steps.check()


@all_policies
def test_plan_is_valid_for_63_later_plans(device: str, policy: AppendPolicy) -> None:
    steps = Steps(build(device, policy, max_blocks_per_layer=64), starts=[0, 1])
    oldest = steps.plan()
    later = [steps.plan() for _ in range(RING - 1)]
    for step in (*later, oldest):
        step.write()
    steps.check()


@all_policies
def test_plan_older_than_the_ring_is_rejected(device: str, policy: AppendPolicy) -> None:
    """The error has the reason: its indices are another plan's by now."""
    steps = Steps(build(device, policy, max_blocks_per_layer=64), starts=[0, 1])
    oldest = steps.plan()
    for _ in range(RING):
        steps.plan()
    before = Snapshot.of(steps.kv)
    with pytest.raises(StalePlan, match="64 plans were made after it and at most 63 may be"):
        oldest.write()
    before.assert_unchanged(steps.kv)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU copies no indices")
@all_policies
def test_plans_made_far_ahead_of_the_gpu(device: str, policy: AppendPolicy) -> None:
    """While the device sleeps, no buffer may be refilled before its copy is done."""
    num_steps, starts = 4000, [0, 1, 5, 9]
    steps = Steps(build(device, policy, block_size=16, max_blocks_per_layer=1100), starts)
    keys = numbered_tokens(steps.kv, list(range(4 * num_steps))).view(num_steps, 4, 3, 5)
    values = -keys
    cuda._sleep(400_000_000)
    for key, value in zip(keys, values, strict=True):
        steps.kv.write(steps.kv.plan_append(0, steps.lists), 0, key, value)
    for row, start in enumerate(starts):
        steps.expected[row] = [-1] * start + list(range(row, 4 * num_steps, 4))
    steps.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU copies no indices")
def test_planning_does_not_wait_for_the_gpu(device: str) -> None:
    """A quarter of the ring is planned and written while the device is busy."""
    steps = Steps(build(device, max_blocks_per_layer=64), [0, 1])
    key = numbered_tokens(steps.kv, [7, 8])
    for _ in range(RING):  # compiled and warm
        steps.kv.write(steps.kv.plan_append(0, steps.lists), 0, key, key)
    cuda.synchronize()
    cuda._sleep(400_000_000)
    busy = cuda.Event()
    busy.record()
    for _ in range(RING // 4):
        steps.kv.write(steps.kv.plan_append(0, steps.lists), 0, key, key)
    assert not busy.query()
