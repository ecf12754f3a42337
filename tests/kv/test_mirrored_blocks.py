"""Cache of another rank: it gets the blocks and the plans of a first cache, and allocates none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer import AppendPolicy, KVBlockManager
from tests.kv.twins import BLOCK_SIZE, assert_same_bits, build

if TYPE_CHECKING:
    from roseinfer.kv.plan import AppendPlan


def _append(
    caches: list[KVBlockManager], layer: int, lists: list[list[int]], count: int
) -> torch.Tensor:
    """Append to lists of the first cache, and write the same plan to all."""
    leader, *others = caches
    tokens = len(lists) * count
    key = torch.rand(tokens, leader.num_heads, leader.head_dim, device=leader.device)
    plan = leader.plan_append(layer, lists, [count] * len(lists))
    leader.write(plan, layer, key, 2 * key)
    for cache in others:
        cache.apply_plan(plan)
        cache.write(plan, layer, key, 2 * key)
    return key


def test_mirrored_lists_have_the_records_and_tokens_of_the_first_cache(device: str) -> None:
    leader, other = caches = [build(device, AppendPolicy(), num_layers=2) for _ in range(2)]
    for layer in range(2):
        for length in (1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1):
            block_list: list[int] = []
            _append(caches, layer, [block_list], length)
            other.mirror_blocks(layer, block_list, length)
            for block in block_list:
                assert other.block_info(block) == leader.block_info(block)
                assert other.refcount(block) == 1
            for mine, theirs in zip(
                leader.gather_sequence(layer, block_list),
                other.gather_sequence(layer, block_list),
                strict=True,
            ):
                assert_same_bits(mine, theirs, "tokens of a mirrored list")


def test_copies_are_made_before_the_write_that_needs_them(device: str) -> None:
    leader, other = caches = [build(device, AppendPolicy()) for _ in range(2)]
    block_list: list[int] = []
    _append(caches, 0, [block_list], BLOCK_SIZE - 2)
    fork = list(block_list)
    leader.incref_blocks(fork)
    observed: list[AppendPlan] = []
    leader.observe_block_copies(observed.append)
    _append(caches, 0, [fork], 1)
    assert fork != block_list
    (copies,) = observed
    assert (copies.copy_from, copies.copy_to) == (block_list, fork)
    other.mirror_blocks(0, fork, BLOCK_SIZE - 1)
    for mine, theirs in zip(
        leader.gather_sequence(0, fork), other.gather_sequence(0, fork), strict=True
    ):
        assert_same_bits(mine, theirs, "tokens of a copied block")
